"""Options that name a cluster, job or plan file; reading and writing files: the planner commands' only file access."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cli.errors import InputError
from plans.plan import Plan
from plans.plan_load import load_plan
from plans.spec.cluster import Cluster
from plans.spec.job import Job
from plans.spec.load import load_cluster, load_job

ClusterOption = Annotated[Path, typer.Option("--cluster", "-c", help="Cluster file (YAML or JSON).")]
JobOption = Annotated[Path, typer.Option("--job", "-j", help="Job file (YAML or JSON).")]
PlanOption = Annotated[Path, typer.Option("--plan", "-p", help="Plan file (JSON), e.g. from `motley plan --out`.")]


MAX_FILE_BYTES = 100_000_000
"""Bytes that a file may have: more than the plan or the link matrix of any cluster."""


def read_text(file: Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: missing, unreadable, too large, or no UTF-8 text.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise InputError(
                f"{file} has more than {MAX_FILE_BYTES // 1_000_000} MB; give a cluster, job or plan file."
            )
        return content.decode("utf-8")
    except OSError as error:
        raise InputError(f"{file} can't be read: {error.strerror}; give the path of an existing file.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is no UTF-8 text (byte {error.start}); give a YAML or JSON file.") from error


def write_text(file: Path, text: str) -> None:
    """Write a file that the caller named.

    Raises:
        InputError: it can't be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file} can't be written: {error.strerror}; give a path in an existing folder.") from error


def require_place(file: Path) -> None:
    """Refuse a file that can't be written, before the work whose result it is to hold.

    Raises:
        InputError: its folder does not exist, or it or its folder may not be written.
    """
    folder = file.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{file} can't be written: there is no folder {folder}; make it, or give another path.")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise InputError(f"{file} can't be written: it is a folder or protected; give another path.")


def read_cluster(file: Path) -> Cluster:
    """Return the cluster of a file; a SpecError lists all its faults."""
    return load_cluster(read_text(file), str(file))


def read_job(file: Path) -> Job:
    """Return the job of a file; a SpecError lists all its faults."""
    return load_job(read_text(file), str(file))


def read_plan(file: Path) -> Plan:
    """Return the plan of a file; a SpecError lists all its faults."""
    return load_plan(read_text(file), str(file))
