from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import deployment_checks
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


@pytest.fixture
def ordinary_folder() -> Iterator[Path]:
    """A folder of its own for an ordinary user, who the test is until it ends: root may write everywhere."""
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:
        if os.getuid() != 0:
            yield Path(folder)
            return
        os.chown(folder, nobody, nobody)
        os.setresuid(nobody, nobody, 0)
        try:
            yield Path(folder)
        finally:
            os.setresuid(0, 0, 0)


def test_home_without_permission_is_refused(ordinary_folder: Path) -> None:
    ordinary_folder.chmod(0o500)
    with pytest.raises(DeploymentError, match="Permission denied"):
        check_home(MotleyHome(ordinary_folder / "home"))


def test_full_disk_is_refused_with_both_numbers(home: MotleyHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 3 * 10**8))
    with pytest.raises(DeploymentError, match=r"has 0\.30 GB left, but 1 GB are needed; free some space"):
        check_home(home)


@pytest.mark.parametrize("name", ["what?", "a#b", "100%", "$HOME", "line\nend", "\udcff"])
def test_home_whose_path_airflow_would_read_as_something_else_is_refused(tmp_path: Path, name: str) -> None:
    """A question mark starts the options of SQLite's address; Airflow expands $NAME in its settings."""
    with pytest.raises(DeploymentError, match="Airflow's settings can't carry; set MOTLEY_HOME to a path without it"):
        check_home(MotleyHome(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["with blanks", "ünï©ode", "käse 漢字", "a&b;c'd", "-dash", "~tilde", "{x}"])
def test_home_of_any_other_path_is_accepted(tmp_path: Path, name: str) -> None:
    check_home(MotleyHome(tmp_path / name))
    assert (tmp_path / name).is_dir()


def test_home_behind_a_link_is_accepted_and_a_dangling_one_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    check_home(MotleyHome(tmp_path / "link"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(DeploymentError, match="can't be written"):
        check_home(MotleyHome(tmp_path / "loop"))


@pytest.mark.parametrize("name", ["airflow", "runs", "store", "state", "workers"])
def test_file_where_a_folder_of_the_home_belongs_is_refused(home: MotleyHome, name: str) -> None:
    home.path.mkdir()
    (home.path / name).touch()
    with pytest.raises(DeploymentError, match=rf"home/{name} can't be written by user \d+ or is of the wrong kind"):
        check_home(home)


@pytest.mark.parametrize("name", ["airflow", "runs", "deployment.json", "airflow/airflow.db"])
def test_home_with_parts_of_another_user_is_refused(ordinary_folder: Path, name: str) -> None:
    home = MotleyHome(ordinary_folder / "home")
    part = home.path / name
    if part.suffix:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch(mode=0o400)
    else:
        part.mkdir(parents=True, mode=0o500)
    with pytest.raises(DeploymentError, match=f"{name} can't be written by user"):
        check_home(home)


def test_migration_that_was_interrupted_is_done_again_and_its_files_are_nobody_elses(home: MotleyHome) -> None:
    home.airflow_dir.mkdir(parents=True)
    mark_airflow_home(home, "3.3.2", is_migrated=False)
    (home.airflow_dir / "airflow.db").write_bytes(b"half")
    assert check_airflow_home(home, "3.3.2")
    mark_airflow_home(home, "3.3.2")
    assert not check_airflow_home(home, "3.3.2")


def test_release_candidates_have_a_place_among_versions(home: MotleyHome) -> None:
    home.airflow_dir.mkdir(parents=True)
    mark_airflow_home(home, "3.3.2rc1")
    assert check_airflow_home(home, "3.3.2")
    with pytest.raises(DeploymentError, match=r"which is newer than 3\.3\.1"):
        check_airflow_home(home, "3.3.1")


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


def test_interpreter_by_a_relative_path_or_by_name_is_made_absolute_with_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that use it run in other folders; behind the link lies another environment."""
    (tmp_path / "env").symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path)
    wanted = str(tmp_path / "env" / "bin" / "python")
    assert engines_python({"MOTLEY_ENGINES_PYTHON": "env/bin/python"}, None) == wanted
    monkeypatch.setenv("PATH", str(tmp_path / "env" / "bin"), prepend=os.pathsep)
    assert engines_python({"MOTLEY_ENGINES_PYTHON": "python"}, None) == wanted
    monkeypatch.setenv("HOME", str(tmp_path))
    assert engines_python({"MOTLEY_ENGINES_PYTHON": "~/env/bin/python"}, None) == wanted


def test_interpreters_are_found_where_there_is_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in many containers, where HOME names a directory that does not exist."""
    monkeypatch.setenv("HOME", "/nonexistent")
    assert engines_python({"MOTLEY_ENGINES_PYTHON": sys.executable}, None) == sys.executable


def test_interpreter_that_does_not_answer_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(deployment_checks, "ANSWER_TIMEOUT_S", 0.2)
    for call in (
        lambda: engines_python({"MOTLEY_ENGINES_PYTHON": str(slow)}, None),
        lambda: airflow_python({"MOTLEY_AIRFLOW_PYTHON": str(slow)}),
    ):
        with pytest.raises(DeploymentError, match="did not answer within 0 s; try again when the machine is less busy"):
            call()
