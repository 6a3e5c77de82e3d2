"""Run and iteration records, profiles, plans, metrics and discovery of iterations."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from storage.errors import (
    AlreadyPublishedError,
    CorruptObjectError,
    InvalidInputError,
    InvalidNameError,
    ObjectMissingError,
    RunNotEmptyError,
    SchemaVersionError,
    UnsupportedStoreError,
)
from storage.iterations import find_iterations, find_records
from storage.manifest import read_part
from storage.metrics import export_metrics, metrics_table
from storage.runs import (
    IterationRecord,
    create_run,
    list_runs,
    load_run,
    read_iteration,
    read_plan,
    read_profile,
    write_iteration,
    write_plan,
    write_profile,
)
from storage.store import Store, open_store
from tests.helpers.storage_builders import NOW, RUN, new_run, write_iteration_data


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path), is_synced=False)


def test_run_record_round_trips(store: Store) -> None:
    record = new_run(store)
    assert load_run(store, RUN) == record


@pytest.mark.parametrize("left", ["run.json", "iterations/0/rollouts/shard-00000/a1/rows.parquet", "stray.txt"])
def test_c20_new_run_refuses_a_folder_that_is_not_empty(store: Store, left: str) -> None:
    """C20: a fresh run picked up old rollouts."""
    store.publish(f"{RUN}/{left}", b"old")
    with pytest.raises(RunNotEmptyError, match=f"it holds {RUN}/{left}.*motley resume {RUN}"):
        new_run(store)
    assert store.read_bytes(f"{RUN}/{left}") == b"old"


def test_c20_every_key_starts_with_the_run_so_runs_share_nothing(store: Store) -> None:
    """C20: the run's name is in every path."""
    new_run(store)
    write_iteration_data(store)
    new_run(store, "run-10")
    assert {info.key.split("/")[0] for info in store.list("")} == {RUN, "run-10"}
    assert find_iterations(store, "run-10") == []
    assert list_runs(store) == [RUN, "run-10"]


def test_second_creation_of_a_run_is_refused(store: Store) -> None:
    record = new_run(store)
    with pytest.raises(RunNotEmptyError):
        create_run(store, record)


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a b", "-x", "é", "x" * 128, "a\n"])
def test_run_name_that_cannot_be_a_folder_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidNameError, match=r"run name .* cannot be part of an object key"):
        new_run(store, name)
    assert list(store.list("")) == []


def test_missing_run_is_a_sentence(store: Store) -> None:
    with pytest.raises(ObjectMissingError, match="has no run 'nope'; `motley runs` lists"):
        load_run(store, "nope")


def test_damaged_and_newer_run_records_are_typed(store: Store) -> None:
    new_run(store)
    data = store.read_bytes(f"{RUN}/run.json")
    store.publish(f"{RUN}/run.json", data.replace(b"motley.run/1", b"motley.run/2"))
    with pytest.raises(SchemaVersionError, match="update Motley"):
        load_run(store, RUN)
    store.publish(f"{RUN}/run.json", data.replace(b"motley.run/1", b"motley.job/1"))
    with pytest.raises(CorruptObjectError, match=r"field format is 'motley.job/1', but only 'motley.run/1'"):
        load_run(store, RUN)
    store.publish(f"{RUN}/run.json", data[:50])
    with pytest.raises(CorruptObjectError, match="no complete JSON document"):
        load_run(store, RUN)


def test_iteration_record_is_replaced_by_a_fuller_one(store: Store) -> None:
    write_iteration(store, IterationRecord(run=RUN, iteration=3))
    fuller = IterationRecord(run=RUN, iteration=3, metrics={"reward_mean": 0.5, "kl": None}, started_at=NOW)
    write_iteration(store, fuller)
    assert read_iteration(store, RUN, 3) == fuller


def test_metric_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValidationError, match="finite number"):
        IterationRecord(run=RUN, iteration=0, metrics={"loss": float("nan")})


def test_plans_and_profiles_are_numbered_and_never_change(store: Store) -> None:
    plan, profile = {"format": "motley.plan/1", "method": "x"}, {"format": "motley.profile/1", "tflops": 1.5}
    assert write_plan(store, RUN, 0, plan) == write_plan(store, RUN, 0, plan) == f"{RUN}/plans/0.json"
    assert write_profile(store, RUN, 2, profile, queue="va-0") == f"{RUN}/profiles/2/va-0.json"
    assert (read_plan(store, RUN, 0), read_profile(store, RUN, 2, queue="va-0")) == (plan, profile)
    with pytest.raises(AlreadyPublishedError, match="another plan is already committed there"):
        write_plan(store, RUN, 0, {**plan, "method": "y"})
    with pytest.raises(InvalidInputError, match="field format is None"):
        write_plan(store, RUN, 1, {})
    with pytest.raises(InvalidInputError, match="field /tflops cannot be stored"):
        write_profile(store, RUN, 3, {"format": "motley.profile/1", "tflops": float("nan")})
    with pytest.raises(ObjectMissingError):
        read_profile(store, RUN, 9)


def test_iterations_are_found_over_gaps_without_listing(store: Store) -> None:
    for iteration in (0, 1, 5, 12):
        write_iteration(store, IterationRecord(run=RUN, iteration=iteration))
    write_iteration_data(store, 6)
    write_iteration(store, IterationRecord(run=RUN, iteration=40))
    assert find_iterations(store, RUN) == [0, 1, 5, 6, 12]
    assert [record.iteration for record in find_records(store, RUN)] == [0, 1, 5, 12]


def test_metrics_are_one_long_table_and_export_to_parquet(store: Store) -> None:
    record = IterationRecord(
        run=RUN,
        iteration=0,
        policy_version_end=1,
        measured_s={"train": 2.5},
        counts={"rows": 8},
        metrics={"reward_mean": 0.25, "kl": None},
        optimizer_steps=[{"loss": 0.5}, {"loss": 0.25}],
    )
    write_iteration(store, record)
    expected = [
        (None, "counts/rows", 8.0),
        (None, "kl", None),
        (None, "measured_s/train", 2.5),
        (None, "reward_mean", 0.25),
        (0, "loss", 0.5),
        (1, "loss", 0.25),
    ]
    table = metrics_table(store, RUN)
    assert [(row["optimizer_step"], row["name"], row["value"]) for row in table.to_pylist()] == expected
    assert set(table["policy_version"].to_pylist()) == {1}
    manifest = export_metrics(store, RUN, created_by="test")
    assert pq.read_table(io.BytesIO(read_part(store, manifest.parts[0]))).equals(table)
    assert export_metrics(store, RUN, created_by="test") == manifest
    write_iteration(store, IterationRecord(run=RUN, iteration=1, metrics={"kl": 1.0}))
    assert export_metrics(store, RUN, created_by="test").rows == 7


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("nothing://x", "cannot be opened"),
        ("s3://key:secret@bucket/x", "holds credentials: put them in the environment"),
    ],
)
def test_store_url_that_cannot_be_used_is_a_sentence(url: str, fault: str) -> None:
    with pytest.raises(UnsupportedStoreError, match=fault) as caught:
        open_store(url)
    assert "secret" not in str(caught.value).replace("credentials", "")


def test_missing_package_of_a_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UnsupportedStoreError, match="needs the package gcsfs: install Motley's extra"):
        open_store("gs://bucket/x")
