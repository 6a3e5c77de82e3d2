"""How a benchmark of storage records itself: one JSON file, with where and on what it ran."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.planner.record import environment

RESULTS = Path(__file__).resolve().parent / "results"


def write_result(name: str, settings: dict[str, Any], data: Any, folder: Path = RESULTS) -> None:  # noqa: ANN401 - JSON
    """Write ``<folder>/<name>.json`` and print the data."""
    place = {key: value for key, value in environment().items() if key != "commit"}
    document = {
        "benchmark": name,
        "environment": {**place, "commit": _commit(), "load_after": os.getloadavg()},
        "settings": settings,
        "data": data,
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps(data, indent=1))


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip()
