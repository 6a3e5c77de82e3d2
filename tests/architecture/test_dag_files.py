"""Rules of `dags/`: wiring only, from an allow-list, small, quick to parse."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.run_entry import MachineEntry, RunEntry

REPOSITORY = Path(__file__).parents[2]
DAG_FILES = sorted((REPOSITORY / "dags").glob("*.py"))
ALLOWED = {"__future__", "os", "pendulum", "airflow.sdk", "plugins.run_dags"}
MAX_LINES = 60
PARSE_LIMIT_S = 1.0


def test_there_are_dag_files_and_no_package() -> None:
    assert [file.name for file in DAG_FILES] == ["motley_runs.py"]


@pytest.mark.parametrize("file", DAG_FILES, ids=lambda file: file.name)
def test_dag_file_is_wiring_only(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= ALLOWED
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Try)]
    assert len(text.splitlines()) <= MAX_LINES


def test_twenty_runs_are_parsed_within_a_second(tmp_path: Path) -> None:
    """The processor has imported Airflow already, so its import is outside the measured part.

    Processor time, not elapsed time: other work on the machine must not decide the outcome.
    """
    pytest.importorskip("airflow.sdk")
    runs = tmp_path / "runs"
    runs.mkdir()
    for number in range(20):
        entry = RunEntry(
            run=f"run-{number}",
            roots={"local": "file:///data"},
            machines=tuple(MachineEntry(name=f"m{k}", queue=f"q{k}", region="local") for k in range(4)),
            iterations=100,
        )
        (runs / f"{entry.run}.json").write_text(entry.to_json())
    script = (
        "import runpy, time, airflow.sdk\nstart = time.process_time()\n"
        f"found = runpy.run_path({str(DAG_FILES[0])!r})\nspent = time.process_time() - start\n"
        "print('@', spent, sum(name.startswith('motley__') for name in found))"
    )
    environment = {**os.environ, "MOTLEY_HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    _, spent_s, num_dags = done.stdout[done.stdout.index("@") :].split()
    assert int(num_dags) == 20
    assert float(spent_s) < PARSE_LIMIT_S
