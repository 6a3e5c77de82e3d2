"""A stage process starts in a fraction of a second, since nothing heavy is imported before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stages.contract import StageName
from stages.registry import STAGE_MODULES, stage_function

HEAVY = ("accelerate", "duckdb", "pyarrow", "tensorboard", "tokenizers", "torch", "transformers", "vllm")


def test_every_stage_has_a_function() -> None:
    assert list(STAGE_MODULES) == list(StageName)
    assert all(callable(stage_function(name)) for name in StageName)


@pytest.mark.parametrize("module", ["stages.__main__", "stages.check", *STAGE_MODULES.values()])
def test_stage_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []
