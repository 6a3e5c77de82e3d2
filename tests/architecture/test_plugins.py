"""Rules of `plugins/`: registered by entry point only, each module loaded once, no engine near Airflow."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def test_folder_is_hidden_from_airflows_plugin_loader() -> None:
    assert (REPOSITORY / "plugins" / ".airflowignore").read_text() == "*\n"


def test_plugin_is_registered_by_entry_point() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["airflow.plugins"] == {"motley": "plugins.motley_plugin:MotleyPlugin"}
    assert project["scripts"]["motley"] == "cli.app:main"


def test_plugin_module_is_loaded_once_under_its_own_name(tmp_path: Path) -> None:
    """Even when Airflow's plugins folder is the repository's, as in a shared installation."""
    pytest.importorskip("airflow.sdk")
    script = (
        "import sys\nfrom airflow import plugins_manager\n"
        "names = sorted({p.name for p in plugins_manager._get_plugins()[0]})\n"
        "stems = ('timetable', 'motley_plugin', 'stage_operator', 'iteration_dag', 'policy_gate', 'retry_policies')\n"
        "print('@', [s for s in stems if s in sys.modules], 'motley' in names, 'plugins.timetable' in sys.modules)"
    )
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(REPOSITORY / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "PYTHONPATH": str(REPOSITORY),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rpartition("@")[2].strip() == "[] True True"


def test_operators_and_triggers_load_no_engine() -> None:
    pytest.importorskip("airflow.sdk")
    heavy = (
        "torch", "transformers", "vllm", "accelerate", "pyarrow", "duckdb", "stages.engines.manager", "tokenizers",
        "plugins.pages",
    )  # fmt: skip
    script = (
        "import sys, plugins.iteration_dag, plugins.policy_trigger, plugins.motley_plugin\n"
        f"print('@', [m for m in {heavy!r} if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.rpartition("@")[2].strip() == "[]"
