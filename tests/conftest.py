"""Which tests belong to which environment, hypothesis profiles, and no network beyond this machine.

Modules marked `engines` or `vllm` as a whole run where torch is installed; where torch is installed without Airflow
(the engines' environment) only modules with such a mark are collected.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_AIRFLOW = importlib.util.find_spec("airflow") is not None
ENGINE_MARK = re.compile(r"mark\.(engines|vllm)\b")
ENGINE_MODULE = re.compile(r"^pytestmark\s*=\s*(\[[^\]]*|\S*)mark\.(engines|vllm)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the test modules of the other environment."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if not HAS_TORCH and ENGINE_MODULE.search(text):
        return True
    if HAS_TORCH and not HAS_AIRFLOW and not ENGINE_MARK.search(text):
        return True
    return None
