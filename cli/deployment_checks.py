"""What must hold before anything is started; every refusal is a sentence that says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cli.deployment_settings import DAGS_DIR, REPOSITORY
from cli.errors import DeploymentError
from stages.home import ENGINES_PYTHON_VARIABLE, MotleyHome

MIN_FREE_BYTES = 1_000_000_000
"""Space that a deployment needs for its database, logs and a small run."""

AIRFLOW_PYTHON_VARIABLE = "MOTLEY_AIRFLOW_PYTHON"
"""Environment variable with Airflow's interpreter; absent means the one that runs `motley`."""

MARKER_NAME = "motley.json"
"""File in AIRFLOW_HOME that says that Motley made it, and with which Airflow."""

ANSWER_TIMEOUT_S = 300.0
"""Longest wait for an interpreter to import a package; seconds are usual, minutes occur on busy machines and disks."""

_FORBIDDEN_IN_HOME = re.compile(r"[?#%$\x00-\x1f\x7f]")
"""What Airflow's settings and the address of a SQLite file read as something else."""

_VERSION_SCRIPT = "import importlib.metadata as m; print(m.version('apache-airflow-core'))"


def check_home(home: MotleyHome) -> None:
    """Demand a home whose path Airflow can take, that can be written and has room; creates it.

    Raises:
        DeploymentError: it can't be used.
    """
    _check_path(home.path)
    try:
        home.path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home.path):
            pass
    except OSError as error:
        raise DeploymentError(
            f"{home.path} can't be written ({error.strerror}); set MOTLEY_HOME to a directory that you may write."
        ) from error
    _check_parts(home)
    free_bytes = shutil.disk_usage(home.path).free
    if free_bytes < MIN_FREE_BYTES:
        raise DeploymentError(
            f"{home.path} has {free_bytes / 1e9:.2f} GB left, but {MIN_FREE_BYTES / 1e9:.0f} GB are needed; free "
            "some space or set "
            "MOTLEY_HOME to another disk."
        )


def _check_path(path: Path) -> None:
    text = str(path)
    found = sorted(set(_FORBIDDEN_IN_HOME.findall(text)))
    if found or not _is_utf8(text):
        what = f"holds {', '.join(map(repr, found))}" if found else "is no UTF-8 text"
        raise DeploymentError(
            f"The path {text!r} {what}, which Airflow's settings can't carry; set MOTLEY_HOME to a path without it."
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_parts(home: MotleyHome) -> None:
    """Demand that what lies in the home can be written too: another user may have made it."""
    folders = [home.airflow_dir, home.runs_dir, home.store_dir, home.path / "state", home.path / "workers"]
    files = [home.deployment_file, home.path / "deployment.lock", home.airflow_dir / "airflow.db"]
    wrong = [path for path in folders if path.exists() and not (path.is_dir() and os.access(path, os.W_OK | os.X_OK))]
    wrong += [path for path in files if path.exists() and not (path.is_file() and os.access(path, os.R_OK | os.W_OK))]
    if wrong:
        raise DeploymentError(
            f"{', '.join(map(str, wrong))} can't be written by user {os.getuid()} or is of the wrong kind (folder or "
            f"file); set MOTLEY_HOME to a directory of your own, or change the owner of what lies in {home.path}."
        )


def airflow_python(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return Airflow's interpreter and version.

    Raises:
        DeploymentError: that interpreter has no Airflow.
    """
    python = _interpreter(environment.get(AIRFLOW_PYTHON_VARIABLE) or sys.executable)
    done = _run([python, "-c", _VERSION_SCRIPT])
    if done is None or done.returncode != 0:
        raise DeploymentError(
            f"{python} has no Airflow; run `make env`, or set {AIRFLOW_PYTHON_VARIABLE} to an interpreter that has "
            "apache-airflow."
        )
    if not DAGS_DIR.is_dir():
        raise DeploymentError(
            f"{DAGS_DIR} is missing; run `motley` from a clone of the repository (`pip install -e .`)."
        )
    return python, done.stdout.strip()


def engines_python(environment: Mapping[str, str], recorded: str | None) -> str:
    """Return the interpreter of stage processes: named by the environment, by the last `up`, or beside the repository.

    Raises:
        DeploymentError: there is none, or it lacks Motley.
    """
    beside = REPOSITORY / ".venv-engines" / "bin" / "python"
    asked = environment.get(ENGINES_PYTHON_VARIABLE)
    named = _interpreter(asked) if asked else recorded or (str(beside) if beside.exists() else None)
    if named is None:
        raise DeploymentError(
            f"no interpreter for the engines is known; run `make env`, or set {ENGINES_PYTHON_VARIABLE} to one that "
            "has torch, "
            "transformers and Motley."
        )
    done = _run([named, "-c", "import stages.contract"])
    if done is None or done.returncode != 0:
        reason = "does not run" if done is None else (done.stderr.strip().splitlines() or ["fails"])[-1]
        raise DeploymentError(
            f"the engines' interpreter {named} can't import stages.contract ({reason}); run `make env`, or set "
            f"{ENGINES_PYTHON_VARIABLE} to an interpreter in which Motley is installed."
        )
    return os.fspath(named)


def check_airflow_home(home: MotleyHome, version: str, *, database_url: str | None = None) -> bool:
    """Demand that AIRFLOW_HOME is new or Motley's, and not newer than this Airflow; return whether it must be migrated.

    Raises:
        DeploymentError: it belongs to somebody else, or to a newer Airflow.
    """
    folder = home.airflow_dir
    marker = folder / MARKER_NAME
    if not marker.exists():
        if folder.exists() and any(folder.iterdir()):
            raise DeploymentError(
                f"{folder} holds files of another Airflow; move it away, or set MOTLEY_HOME to another directory."
            )
        return True
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
        recorded = str(content["airflow"])
        is_newer = _key(recorded) > _key(version)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeploymentError(
            f"{marker} can't be read ({error}); move {folder} away and run `motley up` again."
        ) from error
    if is_newer:
        raise DeploymentError(
            f"{folder} was made by Airflow {recorded}, which is newer than {version}; install that version, or move "
            "the folder "
            "away (the runs' data is not in it)."
        )
    if recorded != version or content.get("database") != _digest(database_url) or content.get("migrated") is False:
        return True
    return database_url is None and not (folder / "airflow.db").exists()


def mark_airflow_home(
    home: MotleyHome, version: str, *, database_url: str | None = None, is_migrated: bool = True
) -> None:
    """Note that AIRFLOW_HOME is Motley's, and whether its database is migrated for a version.

    It is noted before a migration too: one that is interrupted leaves files, which are nobody else's.
    """
    content = {"airflow": version, "database": _digest(database_url), "migrated": is_migrated}
    marker = home.airflow_dir / MARKER_NAME
    temporary = marker.with_name(f".{MARKER_NAME}.{os.getpid()}")
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.replace(marker)


def _digest(database_url: str | None) -> str | None:
    """Return a digest of a database's URL, which may hold a password; None for the SQLite file."""
    return None if database_url is None else hashlib.sha256(database_url.encode()).hexdigest()


def _key(version: str) -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)  # 3.3.2rc1 counts as 3.3.2
    if numbers is None:
        raise ValueError(f"{version!r} is no version")
    return tuple(int(part) for part in numbers.groups())


def _interpreter(named: str) -> str:
    """Return an interpreter as an absolute path, links kept: they tell a virtual environment from its base."""
    path = Path(named).expanduser() if named.startswith("~/") else Path(named)
    if len(path.parts) == 1:
        return shutil.which(named) or named
    return str(path.absolute())


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Return how a command ended, None if it can't be started.

    Raises:
        DeploymentError: it does not end.
    """
    try:
        # Not in the user's folder: modules that are found there only would be missing in the stages.
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False, cwd="/")
    except OSError:
        return None
    except subprocess.TimeoutExpired as error:
        raise DeploymentError(
            f"{command[0]} did not answer within {ANSWER_TIMEOUT_S:.0f} s; try again when the machine is less busy, or "
            "look at its installation."
        ) from error
