"""The light packages load no heavy library: a fresh interpreter imports them and looks at `sys.modules`."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("accelerate", "airflow", "duckdb", "pulp", "pyarrow", "torch", "transformers", "vllm")


@pytest.mark.parametrize(
    "module",
    [
        "plans",
        "plans.plan",
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


@pytest.mark.parametrize("package", ["plans", "storage", "stages", "cli"])
def test_package_name_resolves_inside_the_repository(package: str) -> None:
    code = f"import {package}; print({package}.__file__ or list({package}.__path__)[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    root = __file__.split("/tests/")[0]
    assert done.stdout.startswith(root)
