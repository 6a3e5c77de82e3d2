"""The light packages load no heavy library: a fresh interpreter imports them and looks at `sys.modules`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("accelerate", "airflow", "duckdb", "numba", "pulp", "pyarrow", "torch", "transformers", "vllm")
"""What no light package loads."""
NUMERIC = ("numpy", "scipy", "sklearn")
"""What the Airflow side does not load either: a DAG file is parsed again and again."""


def _used_by_the_airflow_side() -> list[str]:
    """Return every module of the other folders that `plugins` and `dags` import, by reading their source."""
    found = set()
    for file in [*(ROOT / "plugins").glob("*.py"), *(ROOT / "dags").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names] if "." not in node.module else []
                found |= {node.module, *names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    packages = ("plans", "storage", "stages")
    return sorted(name for name in found if name.partition(".")[0] in packages)


def test_airflow_side_loads_neither_heavy_nor_numeric_libraries() -> None:
    """Parsing a DAG file costs what its imports cost."""
    modules = _used_by_the_airflow_side()
    assert {"plans.errors", "stages.contract", "storage.errors"} <= set(modules)
    code = f"import sys, {', '.join(modules)}; print([m for m in {(*HEAVY, *NUMERIC)!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


@pytest.mark.parametrize("module", ["plans", "plans.errors", "stages.errors", "stages.contract", "stages.home"])
def test_contract_module_loads_no_numeric_library(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {NUMERIC!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


@pytest.mark.parametrize(
    "module",
    [
        "plans",
        "plans.plan",
        "plans.cost",
        "plans.search.planner",
        "storage.layout",
        "storage.store",
        "stages.contract",
        "stages.errors",
        "stages.spec.execution",
        "stages.engines.protocol",
    ],
)
def test_light_module_imported_alone_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


@pytest.mark.parametrize("stage", ["plan", "commit_policy", "replicate", "report"])
def test_stage_without_an_engine_loads_no_http_client(stage: str) -> None:
    """A stage process lives for a second or two; the client would be a good part of that."""
    code = f"import sys, stages.{stage}; print([m for m in ('httpx', 'rich', 'click') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


@pytest.mark.parametrize("package", ["plans", "storage", "stages", "cli"])
def test_package_name_resolves_inside_the_repository(package: str) -> None:
    code = f"import {package}; print({package}.__file__ or list({package}.__path__)[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    root = __file__.split("/tests/")[0]
    assert done.stdout.startswith(root)
