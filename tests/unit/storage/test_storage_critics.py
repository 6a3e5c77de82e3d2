"""Critic versions in the store: one commit of weights and resume point."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from storage.critics import local_critic_folder, publish_critic, resolve_critic
from storage.errors import AlreadyPublishedError, CorruptObjectError, ObjectMissingError, ResumeMismatchError
from storage.layout import critic_folder, manifest_key
from storage.parsed_keys import Kind, parse_key
from storage.policies import publish_policy
from storage.retention import RetentionRule, apply_retention
from storage.runs import IterationRecord, write_iteration
from storage.store import Store, open_store
from storage.verify import verify_run


def weights(value: float) -> bytes:
    return save({"score.weight": np.full((1, 4), value, dtype=np.float32)})


def publish(store: Store, version: int, value: float = 1.0) -> str:
    critic = publish_critic(
        store, "r", version, {"model.safetensors": weights(value), "config.json": b"{}"}, {"trainer.json": b"{}"},
        config_hash="c", dataset_fingerprint="d", created_by="test", metadata={"inputs": "i"},
    )  # fmt: skip
    return critic.weights_hash


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def test_published_critic_is_found_with_both_folders(store: Store) -> None:
    digest = publish(store, 3)
    critic = resolve_critic(store, "r", 3, config_hash="c", dataset_fingerprint="d")
    folder = local_critic_folder(store, critic)
    assert critic.weights_hash == digest
    assert folder is not None
    assert (folder / "model" / "model.safetensors").read_bytes() == weights(1.0)
    assert (folder / "trainer" / "trainer.json").is_file()


def test_same_content_again_is_success_and_other_content_is_refused(store: Store) -> None:
    assert publish(store, 1) == publish(store, 1)
    with pytest.raises(AlreadyPublishedError):
        publish(store, 1, value=2.0)


def test_missing_and_foreign_critics_are_refused(store: Store) -> None:
    publish(store, 1)
    with pytest.raises(ObjectMissingError):
        resolve_critic(store, "r", 2)
    with pytest.raises(ResumeMismatchError, match="config_hash is c, this run's is other"):
        resolve_critic(store, "r", 1, config_hash="other")


def test_manifest_of_another_version_is_no_critic(store: Store) -> None:
    publish(store, 1)
    store.publish(manifest_key(critic_folder("r", 2)), store.read_bytes(manifest_key(critic_folder("r", 1))))
    with pytest.raises(CorruptObjectError):
        resolve_critic(store, "r", 2)


def test_keys_of_critics_parse_back() -> None:
    parsed = parse_key(f"{critic_folder('r', 7)}/a1/model/model.safetensors")
    assert (parsed.kind, parsed.number, parsed.name) == (Kind.CRITIC, 7, "model/model.safetensors")


def test_old_critics_go_with_old_policies_and_the_first_stays(store: Store) -> None:
    for version in range(6):
        publish(store, version)
        publish_policy(store, "r", version, {"model.safetensors": weights(version)}, created_by="test")
        write_iteration(store, IterationRecord(run="r", iteration=version))
    deleted = apply_retention(store, "r", RetentionRule(keep_newest=2), datetime(2026, 1, 1, tzinfo=UTC)).deleted
    assert [folder for folder in deleted if "/critics/" in folder] == [critic_folder("r", v) for v in (1, 2, 3)]
    assert resolve_critic(store, "r", 0).version == 0


def test_verify_finds_a_damaged_critic(store: Store) -> None:
    publish(store, 1)
    critic = resolve_critic(store, "r", 1)
    folder = local_critic_folder(store, critic)
    assert folder is not None
    (folder / "model" / "model.safetensors").write_bytes(b"gone")
    findings = [finding.key for finding in verify_run(store, "r").findings]
    assert manifest_key(critic_folder("r", 1)) in findings
