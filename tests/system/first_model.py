"""A job whose first model exists already, so that a campaign of many runs warms it up once."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import yaml

from stages.home import ENGINES_PYTHON_VARIABLE
from tests.system.deployed import REPOSITORY


def with_first_model(job: Path, folder: Path) -> Path:
    """Make the model of a job's `init` source in `folder`; return a copy of the job that starts from it."""
    document = yaml.safe_load(job.read_text(encoding="utf-8"))
    spec = {
        "source": document["source"],
        "shape": document["models"]["actor"]["shape"],
        "seed": document["seed"],
        "data": document["data"],
    }
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    done = subprocess.run(
        [os.environ[ENGINES_PYTHON_VARIABLE], "-m", "stages.models", "--folder", str(folder)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document["source"] = {"type": "hf", "path": str(folder / "model")}
    copy = folder / "job.yaml"
    copy.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return copy
