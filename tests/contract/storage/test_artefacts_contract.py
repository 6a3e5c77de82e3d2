"""Rollouts, policies, resume points, retention, SQL and verification on every store."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from storage.checkpoints import load_checkpoint, read_checkpoint_file, save_checkpoint
from storage.layout import policy_folder
from storage.leases import release_lease, take_lease
from storage.manifest import find_valid
from storage.metrics import export_metrics
from storage.policies import head_version, publish_policy, resolve_policy
from storage.policy_fetch import fetch_policy
from storage.retention import RetentionRule, apply_retention
from storage.rollouts import find_shard, read_rollouts
from storage.runs import IterationRecord, list_runs, write_iteration
from storage.sql import connect
from storage.store import Store
from storage.verify import verify_run
from tests.helpers.storage_builders import NOW, RUN, new_run, policy_files, write_iteration_data


def test_rollouts_are_read_in_prompt_order_with_rewards_joined(store: Store) -> None:
    write_iteration_data(store)
    table = read_rollouts(store, RUN, 0, columns=["prompt_index", "sample_index", "reward"], families=["reward"])
    assert table.to_pydict() == {
        "prompt_index": [0, 0, 1, 1, 2, 2, 3, 3],
        "sample_index": [0, 1] * 4,
        "reward": [0.0, 1.0] * 4,
    }
    manifest = find_shard(store, RUN, 0, 1, input_fingerprint="f", is_hash_checked=True)
    assert manifest is not None
    assert (manifest.rows, manifest.policy_versions) == (4, (0,))


def test_policy_is_published_resolved_and_fetched(store: Store, tmp_path: Path) -> None:
    published = publish_policy(store, RUN, 0, policy_files(), created_by="test")
    assert head_version(store, RUN) == 0
    resolved = resolve_policy(store, RUN)
    assert resolved == published
    folder = fetch_policy([store], resolved, tmp_path / "policy").local.folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == policy_files()


def test_checkpoint_is_saved_and_loaded(store: Store) -> None:
    files = {"optimizer.bin": b"opt" * 1000, "rng-0.bin": b"r0", "rng-1.bin": b"r1"}
    save_checkpoint(
        store,
        RUN,
        3,
        files,
        config_hash="c",
        dataset_fingerprint="d",
        data_position={"epoch": 1, "index": 24},
        rng_files=["rng-0.bin", "rng-1.bin"],
        created_by="test",
    )
    found = load_checkpoint(store, RUN, config_hash="c", dataset_fingerprint="d")
    assert (found.version, found.data_position, found.rng_files) == (
        3,
        {"epoch": 1, "index": 24},
        ("rng-0.bin", "rng-1.bin"),
    )
    assert {name: read_checkpoint_file(store, found, name) for name in files} == files


def test_sql_joins_what_is_committed(store: Store) -> None:
    new_run(store)
    write_iteration_data(store, 0)
    write_iteration_data(store, 1)
    write_iteration(store, IterationRecord(run=RUN, iteration=0, metrics={"reward_mean": 0.5}, counts={"rows": 8}))
    with connect(store, RUN) as connection:
        by_prompt = connection.sql(
            "SELECT iteration, prompt_id, avg(reward), count(*) FROM completions WHERE prompt_index < 1 "
            "GROUP BY ALL ORDER BY ALL"
        ).fetchall()
        metrics = connection.sql("SELECT name, value FROM metrics ORDER BY name").fetchall()
        empty = connection.sql("SELECT count(*) FROM training").fetchall()
    assert by_prompt == [(0, "arithmetic/0", 0.5, 2), (1, "arithmetic/0", 0.5, 2)]
    assert metrics == [("counts/rows", 8.0), ("reward_mean", 0.5)]
    assert empty == [(0,)]


def test_whole_run_verifies_and_is_listed(store: Store) -> None:
    new_run(store)
    write_iteration_data(store)
    publish_policy(store, RUN, 0, policy_files(), created_by="test")
    write_iteration(store, IterationRecord(run=RUN, iteration=0, metrics={"reward_mean": 0.5}))
    assert export_metrics(store, RUN, created_by="test").rows == 1
    report = verify_run(store, RUN)
    assert report.findings == []
    assert (report.num_artefacts, report.num_documents, report.num_parts) == (5, 3, 6)
    assert list_runs(store) == [RUN]


def test_retention_deletes_at_once_what_no_lease_names(store: Store) -> None:
    for version in range(6):
        publish_policy(store, RUN, version, policy_files(version), created_by="test")
        write_iteration(store, IterationRecord(run=RUN, iteration=version))
    rule = RetentionRule(keep_newest=1)
    take_lease(store, RUN, "engine-0", expires_at=NOW + timedelta(hours=1), policy_versions=[2])
    report = apply_retention(store, RUN, rule, NOW)
    assert report.deleted == [policy_folder(RUN, version) for version in (1, 3)]
    assert report.spared == [policy_folder(RUN, 2)]
    kept = [version for version in range(6) if find_valid(store, policy_folder(RUN, version))]
    assert kept == [0, 2, 4, 5]
    assert release_lease(store, RUN, "engine-0") is True
    assert apply_retention(store, RUN, rule, NOW).deleted == [policy_folder(RUN, 2)]
