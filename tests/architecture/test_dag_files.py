"""Rules of `dags/`: wiring only, from an allow-list, small, quick to parse."""

from __future__ import annotations

import ast
import json
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
MAX_CALLS_PER_RUN = 10_000
"""Of Python functions, for a run on four machines: about 7,300 are needed, which take 5 to 20 ms."""
HEAVY = {"torch", "transformers", "vllm", "megatron", "duckdb", "pyarrow", "numba", "pulp", "matplotlib"}
COUNT_CALLS = """
import json, runpy, sys
import airflow.sdk  # as in the DAG processor, which has imported it already
runpy.run_path(sys.argv[1])  # what only the first parse loads
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
found = runpy.run_path(sys.argv[1])
sys.setprofile(None)
packages = sorted({name.partition(".")[0] for name in sys.modules})
print("@", json.dumps({"calls": calls, "dags": sum(n.startswith("motley__") for n in found), "packages": packages}))
"""


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


def test_parsing_takes_calls_in_proportion_to_runs_and_loads_nothing_heavy(tmp_path: Path) -> None:
    """Python calls, not seconds: a slow machine must not decide the outcome; benchmarks/dag_width measures seconds."""
    pytest.importorskip("airflow.sdk")
    few, loaded = _calls_of_parsing(tmp_path / "few", 10)
    many, _ = _calls_of_parsing(tmp_path / "many", 20)
    assert many < 20 * MAX_CALLS_PER_RUN
    assert many <= 2.05 * few
    assert not loaded & HEAVY


def _calls_of_parsing(home: Path, num_runs: int) -> tuple[int, set[str]]:
    """Return the calls that a second parse of so many runs makes, and the packages that are loaded then."""
    runs = home / "runs"
    runs.mkdir(parents=True)
    for number in range(num_runs):
        entry = RunEntry(
            run=f"run-{number}",
            roots={"local": "file:///data"},
            machines=tuple(MachineEntry(name=f"m{k}", queue=f"q{k}", region="local") for k in range(4)),
            iterations=100,
        )
        (runs / f"{entry.run}.json").write_text(entry.to_json())
    environment = {**os.environ, "MOTLEY_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_CALLS, str(DAG_FILES[0])],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout[done.stdout.index("@") + 1 :])
    assert found["dags"] == num_runs
    return found["calls"], set(found["packages"])
