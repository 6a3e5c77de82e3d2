"""How a benchmark records itself: machine, commit, versions, date, settings; JSON beside a table and a plot."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("numpy", "numba", "pydantic", "deap", "pulp", "highspy", "simpy")


def environment() -> dict[str, Any]:
    """Return where and on what a benchmark runs."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform()},
        "load_before": os.getloadavg(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def write_result(name: str, settings: dict[str, Any], data: Any, table: str, *, out: Path | None = None) -> Path:  # noqa: ANN401 - JSON
    """Write `<name>.json` and `<name>.md`; return the folder."""
    folder = out if out is not None else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": name, "environment": environment(), "settings": settings, "data": data}
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    head = f"# {name}\n\n{_settings_line(settings)}\n\n"
    (folder / f"{name}.md").write_text(head + table + "\n", encoding="utf-8")
    print(table)
    print(f"written to {folder / name}.json and .md")
    return folder


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; fractions with four significant digits."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _settings_line(settings: dict[str, Any]) -> str:
    return "; ".join(f"{key}: {value}" for key, value in settings.items())


def commit() -> dict[str, Any]:
    """Return the commit of this work tree, and whether the planner has changes that it does not hold."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../../plans")
    return {"id": git("rev-parse", "HEAD"), "plans_modified": bool(changed)}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
