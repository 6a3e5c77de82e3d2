"""The example of two regions in one command: `python -m scripts.regions.example --folder DIR`, or `make two-regions`.

Regions with their S3 servers and the shaped link between them, Airflow with a worker in each, a run, what crossed the
link, and all of it down again. The folder stays: buckets, logs and journals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plans.spec.load import load_cluster
from scripts.regions.airflow import bring_down, bring_up, motley
from scripts.regions.layout import REPOSITORY, Regions, load, planned
from scripts.regions.network import start, usable_mode
from scripts.regions.summary import print_summary

EXAMPLE = REPOSITORY / "examples" / "two-regions"
"""Cluster, job and plan."""

RUN = "two-regions"
"""Name of the run."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that came to its end, the regions still up."""

    layout: Regions
    """The regions."""
    outcome: dict[str, Any]
    """What `motley run` printed."""
    verified: dict[str, Any]
    """What `motley verify` printed of all stores."""


@contextmanager
def finished_run(folder: Path, *, iterations: int | None = None) -> Iterator[Finished]:
    """Run the example in a new folder and give what came out; everything is down afterwards.

    Args:
        folder: Where buckets, homes, logs and journals lie.
        iterations: Default the job's.

    Raises:
        CalledProcessError: a `motley` command failed; its reason is on standard error.
    """
    cluster_file = EXAMPLE / "cluster.yaml"
    cluster = load_cluster(cluster_file.read_text(encoding="utf-8"), str(cluster_file))
    layout = start(planned(cluster, folder, usable_mode()), folder)
    try:
        _say(f"regions up ({layout.mode}): {', '.join(region.name for region in layout.regions)}")
        layout = bring_up(layout, folder, cluster_file)
        _say("workers up in every region")
        files = [f"--{name}={EXAMPLE / name}.yaml" for name in ("cluster", "job", "plan")]
        number = [] if iterations is None else [f"--iterations={iterations}"]
        outcome = motley(layout, layout.home, "run", "--name", RUN, *files, *number)
        yield Finished(layout, outcome, motley(layout, layout.home, "verify", RUN))
    finally:
        bring_down(load(folder) or layout, folder)  # the document knows what came up last


def main() -> int:
    """Run the example, print what crossed the link, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.regions.example", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder, where everything lies")
    parser.add_argument("--iterations", type=int, help="default: the job's")
    given = parser.parse_args()
    folder: Path = given.folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        sys.stderr.write(f"{folder} is not empty; give a new folder, or remove it.\n")
        return 2
    with finished_run(folder, iterations=given.iterations) as finished:
        layout, outcome, verified = finished.layout, finished.outcome, finished.verified
    print(f"Run {RUN}: {outcome['state']}, policy version {outcome['policy_version']}.")
    print(f"  motley verify: {'whole' if verified['is_good'] else 'DAMAGED'} ({', '.join(verified['stores'])})")
    print_summary(layout, RUN, outcome["iterations"])
    print(f"Buckets, logs and the journals of the link: {folder}")
    return 0 if outcome["state"] == "finished" and verified["is_good"] else 1


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
