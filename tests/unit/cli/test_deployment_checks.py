from __future__ import annotations

import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from cli.deployment_checks import airflow_python, check_airflow_home, check_home, engines_python, mark_airflow_home
from cli.errors import DeploymentError
from stages.home import MotleyHome

Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def home(tmp_path: Path) -> MotleyHome:
    return MotleyHome(tmp_path / "home")


def test_home_is_created(home: MotleyHome) -> None:
    check_home(home)
    assert list(home.path.iterdir()) == []


def test_home_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        DeploymentError, match=r"can't be written .*; set MOTLEY_HOME to a directory that you may write"
    ):
        check_home(MotleyHome(tmp_path / "file" / "home"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_home_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DeploymentError, match="Permission denied"):
        check_home(MotleyHome(tmp_path / "home"))


def test_full_disk_is_refused_with_both_numbers(home: MotleyHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 3 * 10**8))
    with pytest.raises(DeploymentError, match=r"has 0\.30 GB left, but 1 GB are needed; free some space"):
        check_home(home)


def test_new_airflow_home_must_be_migrated_and_a_marked_one_not(home: MotleyHome) -> None:
    assert check_airflow_home(home, "3.3.2")
    home.airflow_dir.mkdir(parents=True)
    assert check_airflow_home(home, "3.3.2")
    mark_airflow_home(home, "3.3.2")
    assert check_airflow_home(home, "3.3.2")  # marked, but without a database
    (home.airflow_dir / "airflow.db").touch()
    assert not check_airflow_home(home, "3.3.2")
    assert check_airflow_home(home, "3.4.0")


def test_foreign_airflow_home_is_refused(home: MotleyHome) -> None:
    home.airflow_dir.mkdir(parents=True)
    (home.airflow_dir / "airflow.cfg").touch()
    with pytest.raises(DeploymentError, match="holds files of another Airflow; move it away"):
        check_airflow_home(home, "3.3.2")


def test_airflow_home_of_a_newer_airflow_is_refused(home: MotleyHome) -> None:
    home.airflow_dir.mkdir(parents=True)
    mark_airflow_home(home, "3.10.0")
    with pytest.raises(DeploymentError, match=r"was made by Airflow 3\.10\.0, which is newer than 3\.4\.1"):
        check_airflow_home(home, "3.4.1")


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"airflow": "trunk"})])
def test_damaged_marker_is_refused(home: MotleyHome, content: str) -> None:
    home.airflow_dir.mkdir(parents=True)
    (home.airflow_dir / "motley.json").write_text(content)
    with pytest.raises(DeploymentError, match=r"motley\.json can't be read"):
        check_airflow_home(home, "3.3.2")


def test_interpreter_without_airflow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="has no Airflow; run `make env`"):
        airflow_python({"MOTLEY_AIRFLOW_PYTHON": str(tmp_path / "none")})


def test_engines_interpreter_named_by_environment_goes_before_the_recorded_one() -> None:
    assert engines_python({"MOTLEY_ENGINES_PYTHON": sys.executable}, "/recorded") == sys.executable
    assert engines_python({}, sys.executable) == sys.executable


def test_engines_interpreter_that_lacks_motley_is_refused(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'stages'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    with pytest.raises(
        DeploymentError, match=r"can't import stages.contract .ModuleNotFoundError: No module named 'stages'"
    ):
        engines_python({"MOTLEY_ENGINES_PYTHON": str(bare)}, None)
    with pytest.raises(DeploymentError, match="does not run"):
        engines_python({"MOTLEY_ENGINES_PYTHON": str(tmp_path / "none")}, None)
