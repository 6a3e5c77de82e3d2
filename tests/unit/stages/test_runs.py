from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from stages.errors import ContractError, SpecFaultsError
from stages.home import MAX_ITERATIONS, logical_date_of
from stages.runs import ResolvedRun, create_run, demand_entry, load_run, resolve_run
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


def test_compute_type_for_a_machine_that_the_cluster_lacks_is_refused_by_name(tmp_path: Path) -> None:
    changed = JOB.replace("dtype: fp32", "dtype: fp32, dtype_on: {local: bf16, cpu: bf16, lokal: bf16, V100: fp32}")
    assert changed != JOB
    with pytest.raises(SpecFaultsError) as caught:
        resolve(tmp_path, job=changed)
    assert caught.value.faults == [
        f"job file: engines.generation.dtype_on names {name!r}, but the cluster has no machine and no GPU type of that "
        "name; write one of local, cpu."
        for name in ("lokal", "V100")
    ]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/abs",
        "-x",
        "_x",
        "a b",
        " a",
        "a~b",
        "a\n",
        "a\0b",
        "é",
        "x" * 101,
        "a:b",
        "a\\b",
    ],
)
def test_name_that_is_no_part_of_dag_ids_and_keys_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecFaultsError) as caught:
        resolve_run(JOB, CLUSTER, name, None, None, str(tmp_path))
    assert caught.value.faults == [
        f"run name is {name!r}, but names have 1 to 100 of A-Z a-z 0-9 . _ - and start with a letter or digit; "
        "choose another one."
    ]


@pytest.mark.parametrize("name", ["a", "7", "a.json", "A-b_c.d", "x" * 100])
def test_name_that_is_accepted_has_an_entry(tmp_path: Path, name: str) -> None:
    assert demand_entry(resolve_run(JOB, CLUSTER, name, None, None, str(tmp_path))).run == name


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("name: local", f"name: {'m' * 101}", "machines[0].name is 'mmm"),
        ("name: local", "name: local, queue: 'a b'", "machines[0].queue is 'a b', but names have 1 to 100"),
        ("region: local", f"region: {'r' * 101}", "machines[0].region is 'rrr"),
    ],
)
def test_names_of_machines_that_the_airflow_side_can_not_take_are_refused(
    tmp_path: Path, old: str, new: str, fault: str
) -> None:
    assert old in CLUSTER
    with pytest.raises(SpecFaultsError) as caught:
        resolve_run(JOB, CLUSTER.replace(old, new), "r", None, None, str(tmp_path))
    assert any(fault in found for found in caught.value.faults), caught.value.faults


def test_every_iteration_that_is_accepted_has_a_logical_date_that_is_past() -> None:
    assert logical_date_of(MAX_ITERATIONS) < datetime.now(UTC)
    with pytest.raises(SpecFaultsError, match="iterations is 10000001, but a run has 1 to 10000000"):
        resolve_run(JOB, CLUSTER, "r", MAX_ITERATIONS + 1, None, "/tmp")
    with pytest.raises(SpecFaultsError, match="iterations is 10000001"):
        resolve_run(JOB.replace("iterations: 40", "iterations: 10000001"), CLUSTER, "r", None, None, "/tmp")


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
