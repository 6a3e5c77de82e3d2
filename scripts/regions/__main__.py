"""Regions on this computer: `python -m scripts.regions up|exec|down --folder DIR`.

`up --cluster FILE` starts a namespace and an S3 server per region of the cluster file, a namespace for each further
machine of a region, and the lines between them; `exec PLACE COMMAND ...` runs a command in a region, or in the network
of such a machine, with its environment; `down` removes all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from plans.spec.load import load_cluster
from scripts.regions.layout import Mode, environment, load, planned
from scripts.regions.network import inside, start, stop, usable_mode


def main() -> int:
    """Do what is asked and return the exit code."""
    given = _parser().parse_args()
    folder: Path = given.folder.absolute()
    if given.action == "down":
        standing = load(folder)
        if standing is not None:
            stop(standing, folder)
        return 0
    if given.action == "exec":
        standing = load(folder)
        if standing is None:
            sys.stderr.write(f"No regions are up in {folder}; start them with `up` first.\n")
            return 2
        place = standing.place(given.place)
        command = inside(place, given.command)
        return subprocess.run(command, env={**os.environ, **environment(standing, place)}, check=False).returncode
    if load(folder) is not None:
        sys.stderr.write(f"Regions are up in {folder} already; end them with `down` first.\n")
        return 2
    cluster = load_cluster(given.cluster.read_text(encoding="utf-8"), str(given.cluster))
    layout = start(planned(cluster, folder, _mode(given.mode)), folder)
    print(f"{layout.mode}: {', '.join(place.name for place in layout.places)}")
    return 0


def _mode(wanted: Mode | None) -> Mode:
    mode = wanted or usable_mode()
    if mode == "loopback":
        sys.stderr.write("Links are shaped by proxies on loopback: this process may not create network namespaces.\n")
    return mode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.regions", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("up", "down", "exec"):
        action = actions.add_parser(name)
        action.add_argument("--folder", type=Path, required=True, help="where everything lies")
        if name == "up":
            action.add_argument("--cluster", type=Path, required=True)
            action.add_argument("--mode", choices=["namespaces", "loopback"], help="default: what is permitted")
        if name == "exec":
            action.add_argument("place")
            action.add_argument("command", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    sys.exit(main())
