"""`motley rollouts prune` says what goes and what stays, and a dry run removes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.errors import InputError
from cli.rollouts import app
from stages.runs import entry_of
from storage.rollouts import has_rollouts
from storage.store import Store
from tests.helpers.stage_contexts import commit_iterations, make_context, make_run


@pytest.fixture
def home(tmp_path: Path) -> Store:
    """Four committed iterations of a run whose store is the folder `a`."""
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "train", 0)
    commit_iterations(context, 4)
    assert entry_of(run).run == "r"
    return context.home


def call(*arguments: str) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(app, list(arguments))
    return result.output, result.exception


def left(home: Store) -> list[int]:
    return [k for k in range(4) if has_rollouts(home, "r", k)]


def test_dry_run_says_what_would_go_and_removes_nothing(tmp_path: Path, home: Store) -> None:
    said, error = call("prune", f"{tmp_path}/a/r", "--keep-iterations", "3", "--dry-run")
    assert error is None, said
    assert "The newest 3 iterations are kept; rollouts of 1 iteration(s)" in " ".join(said.split())
    assert "would be removed" in said
    assert left(home) == [0, 1, 2, 3]


def test_removal_is_told_row_by_row(tmp_path: Path, home: Store) -> None:
    said, error = call("prune", f"{tmp_path}/a/r", "--keep-days", "1", "--json")
    assert error is None, said
    found = json.loads(said)
    assert [(row["iteration"], row["rows"], row["is_removed"]) for row in found["iterations"]] == [
        (0, 4, True), (1, 4, True), (2, 4, True),
    ]  # fmt: skip
    assert left(home) == [3]
    _, error = call("show", f"{tmp_path}/a/r", "--iteration", "1")
    assert isinstance(error, InputError)
    assert "were removed on" in str(error)


def test_run_that_keeps_everything_needs_a_rule(tmp_path: Path, home: Store) -> None:
    _, error = call("prune", f"{tmp_path}/a/r")
    assert isinstance(error, InputError)
    assert "keeps all rollouts" in str(error)
    assert left(home) == [0, 1, 2, 3]
