"""A fork: a run of its own from a version of another one, with other settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.errors import InputError
from cli.fork import copy_version, forked_run
from cli.run_lookup import FoundRun
from stages.runs import create_run, entry_of, load_run
from storage.checkpoints import load_checkpoint
from storage.iterations import find_iterations
from storage.policies import head_version, resolve_policy
from storage.runs import IterationRecord, write_iteration
from tests.helpers.stage_contexts import make_context, make_run, publish


@pytest.fixture
def parent(tmp_path: Path) -> FoundRun:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "train", 0)
    for version in range(4):
        publish(context, version, is_head=True)
    return FoundRun(name="r", store=context.home, entry=entry_of(run))


def test_fork_has_the_version_its_resume_point_and_the_reference_policy(parent: FoundRun) -> None:
    run = forked_run(parent, 3, "branch", ["optimizer.learning_rate=1e-6"], 9)
    create_run(run)
    copy_version(parent.store, "r", parent.store, run, 3)
    copy_version(parent.store, "r", parent.store, run, 3)  # again after a crash

    assert head_version(parent.store, "branch") == 3
    for version in (0, 3):
        copied, original = (resolve_policy(parent.store, name, version) for name in ("branch", "r"))
        assert copied.weights_hash == original.weights_hash
    resumed = load_checkpoint(parent.store, "branch", 3, config_hash=run.job.fingerprint)
    assert resumed.version == 3
    again = load_run(run.home_root, "branch")
    assert (again.first_iteration, again.job.optimizer.learning_rate, again.iterations) == (3, 1e-6, 9)
    entry = entry_of(again)
    assert (entry.num_dag_runs, entry.is_profile_due(3), entry.is_profile_due(0)) == (6, True, True)
    write_iteration(parent.store, IterationRecord(run="branch", iteration=3))
    assert find_iterations(parent.store, "branch") == [3]


@pytest.mark.parametrize(
    ("version", "settings", "iterations", "sentence"),
    [
        (7, [], None, r"Run r has no policy version 7 \(its newest is 3\)"),
        (3, ["data.seed=5"], None, "A fork of run r can't change data"),
        (3, ["optimizer.speed=5"], None, "--set optimizer.speed=5 names no field of the job"),
        (3, ["optimizer"], None, "--set optimizer names no field of the job"),
        (3, ["optimizer.learning_rate=fast"], None, "'fast' is no value of a job file"),
        (3, ["optimizer.learning_rate=.nan"], None, "'.nan' is no value of a job file"),
        (3, ["optimizer.betas=[0.9"], None, r"'\[0.9' is no value of a job file"),
        (3, ["optimizer.schedule=2026-01-01"], None, "'2026-01-01' is no value of a job file"),
        (3, [], 3, r"makes iterations 3 and later, but it has 3 in all; give --iterations 4 or more"),
    ],
)
def test_fork_that_can_not_be_is_refused(
    parent: FoundRun, version: int, settings: list[str], iterations: int | None, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        forked_run(parent, version, "branch", settings, iterations)


@pytest.mark.parametrize("name", ["", "..", "a/b", "_x", "a~b", "x" * 101])
def test_fork_with_a_name_that_no_run_can_have_is_refused(parent: FoundRun, name: str) -> None:
    with pytest.raises(InputError, match="but names have 1 to 100"):
        forked_run(parent, 3, name, [], None)
