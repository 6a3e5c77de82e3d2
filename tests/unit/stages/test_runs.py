from __future__ import annotations

from pathlib import Path

import pytest

from stages.errors import ContractError, SpecFaultsError
from stages.runs import ResolvedRun, create_run, load_run, resolve_run
from storage.errors import RunNotEmptyError
from storage.layout import run_record
from storage.runs import load_run as load_record
from storage.store import open_store
from tests.helpers.stage_contexts import make_run

EXAMPLE = Path(__file__).parents[3] / "tests" / "helpers" / "addition"
JOB, CLUSTER = (EXAMPLE / "job.yaml").read_text(), (EXAMPLE / "cluster.yaml").read_text()


def resolve(root: Path, *, iterations: int | None = None, seed: int | None = None, job: str = JOB) -> ResolvedRun:
    return resolve_run(job, CLUSTER, "r", iterations, seed, str(root))


def test_resolve_takes_overrides_and_default_root(tmp_path: Path) -> None:
    run = resolve(tmp_path, iterations=7, seed=9)

    assert (run.iterations, run.seed, run.roots) == (7, 9, {"local": str(tmp_path)})


def test_resolve_reports_faults_of_both_files_and_arguments(tmp_path: Path) -> None:
    with pytest.raises(SpecFaultsError) as caught:
        resolve_run(JOB + "\nx: 1\n", "format: motley.cluster/1", "../r", 0, -1, str(tmp_path))

    faults = caught.value.faults
    assert [fault.split(" ")[0] for fault in faults] == [
        "job", "cluster", "cluster", "run", "iterations", "seed",
    ]  # fmt: skip


def test_created_run_is_loaded_equal(tmp_path: Path) -> None:
    run = resolve(tmp_path, iterations=3)

    create_run(run)

    assert load_run(str(tmp_path), "r") == run


def test_new_run_refuses_a_folder_with_anything_in_it(tmp_path: Path) -> None:
    """C20: a fresh run never picks up another one's objects."""
    create_run(resolve(tmp_path))

    with pytest.raises(RunNotEmptyError, match="is not empty"):
        create_run(resolve(tmp_path))


def test_name_that_is_taken_in_one_region_leaves_nothing_in_the_others(tmp_path: Path) -> None:
    """Else the next try would find its own remains."""
    first = make_run(tmp_path)
    home = open_store(first.home_root)
    home.delete(run_record("r"))
    with pytest.raises(RunNotEmptyError, match="b/r is not empty"):
        create_run(first)
    assert list(home.list("r")) == []


def test_resumed_run_may_be_longer(tmp_path: Path) -> None:
    created = create_run(resolve(tmp_path, iterations=3))

    create_run(resolve(tmp_path, iterations=5), is_resumed=True)

    assert load_run(str(tmp_path), "r").iterations == 5
    assert load_record(open_store(str(tmp_path)), "r").created_at == created.created_at


def test_resumed_run_must_be_the_same_job(tmp_path: Path) -> None:
    """C14: what is learned may not change in the middle of a run."""
    create_run(resolve(tmp_path))

    with pytest.raises(ContractError, match="run r was made from another job"):
        create_run(
            resolve(tmp_path, job=JOB.replace("learning_rate: 3.0e-4", "learning_rate: 1.0e-4")), is_resumed=True
        )


def test_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="has no run 'r'"):
        load_run(str(tmp_path), "r")
