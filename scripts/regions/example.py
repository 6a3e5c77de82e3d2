"""An example over several regions in one command: `python -m scripts.regions.example --folder DIR [--name EXAMPLE]`.

Regions with their S3 servers and the shaped link between them, Airflow with a worker on each machine, a run, what
crossed the link, and all of it down again. The folder stays: buckets, logs and journals.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plans.spec.load import load_cluster
from scripts.regions.airflow import bring_down, bring_up, engines_python, motley
from scripts.regions.layout import REPOSITORY, Regions, load, planned
from scripts.regions.network import start, usable_mode
from scripts.regions.summary import print_summary
from stages.spec.job import load_training_job

EXAMPLES = REPOSITORY / "examples"
"""Where they lie: cluster and job, and a plan where the planner shall not choose."""

NAMES = ("two-regions", "ppo-regions")
"""Examples over several regions; a run is called after its example."""


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
def standing_regions(folder: Path, cluster_file: Path) -> Iterator[Regions]:
    """Bring up the regions of a cluster file with Airflow and all workers; everything is down afterwards.

    Args:
        folder: Where buckets, homes, logs and journals lie; it is new.
        cluster_file: The cluster file.

    Raises:
        CalledProcessError: a `motley` command failed; its reason is on standard error.
        TimeoutError: a worker did not come up.
    """
    cluster = load_cluster(cluster_file.read_text(encoding="utf-8"), str(cluster_file))
    layout = start(planned(cluster, folder, usable_mode()), folder)
    try:
        _say(f"regions up ({layout.mode}): {', '.join(place.name for place in layout.places)}")
        layout = bring_up(layout, folder, cluster_file)
        _say("workers up on every machine")
        yield layout
    finally:
        bring_down(load(folder) or layout, folder)  # the document knows what came up last


@contextmanager
def finished_run(folder: Path, name: str, *, iterations: int | None = None) -> Iterator[Finished]:
    """Run an example in a new folder and give what came out; everything is down afterwards.

    Args:
        folder: As for `standing_regions`.
        name: The example.
        iterations: Default the job's.

    Raises:
        CalledProcessError: a command failed; its reason is on standard error.
    """
    example = EXAMPLES / name
    files = {kind: example / f"{kind}.yaml" for kind in ("cluster", "job", "plan")}
    folder.mkdir(parents=True, exist_ok=True)
    files["job"] = runnable_job(files["job"], folder)
    with standing_regions(folder, files["cluster"]) as layout:
        given = [f"--{kind}={file}" for kind, file in files.items() if file.exists()]
        number = [] if iterations is None else [f"--iterations={iterations}"]
        outcome = motley(layout, layout.home, "run", "--name", name, *given, *number)
        yield Finished(layout, outcome, motley(layout, layout.home, "verify", name))


def runnable_job(job_file: Path, folder: Path) -> Path:
    """Return a job file with all that it names: itself, or a copy in the folder with its reward model beside it.

    Raises:
        CalledProcessError: the reward model could not be made; the reason is on standard error.
    """
    model = load_training_job(job_file.read_text(encoding="utf-8"), str(job_file)).reward_model
    if model is None or model.path is None:
        return job_file
    _say("making the reward model")
    copy = folder / "job.yaml"
    if copy != job_file:
        shutil.copyfile(job_file, copy)
    command = [
        engines_python(), "-m", "scripts.reward_model", "--job", str(copy), "--out", str(folder / model.path),
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(REPOSITORY)}
    # What it prints is no part of what this process prints.
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    return copy


def main() -> int:
    """Run the example, print what crossed the link, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.regions.example", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder, where everything lies")
    parser.add_argument("--name", choices=NAMES, default=NAMES[0], help="default: %(default)s")
    parser.add_argument("--iterations", type=int, help="default: the job's")
    given = parser.parse_args()
    folder: Path = given.folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        sys.stderr.write(f"{folder} is not empty; give a new folder, or remove it.\n")
        return 2
    with finished_run(folder, given.name, iterations=given.iterations) as finished:
        layout, outcome, verified = finished.layout, finished.outcome, finished.verified
    print(f"Run {given.name}: {outcome['state']}, policy version {outcome['policy_version']}.")
    print(f"  motley verify: {'whole' if verified['is_good'] else 'DAMAGED'} ({', '.join(verified['stores'])})")
    print_summary(layout, given.name, outcome["iterations"])
    print(f"Buckets, logs and the journals of the link: {folder}")
    return 0 if outcome["state"] == "finished" and verified["is_good"] else 1


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
