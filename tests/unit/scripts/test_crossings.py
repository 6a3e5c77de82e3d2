"""What is said of a run over two regions follows from its buckets and from the journals of the lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from plans.spec.load import load_cluster
from scripts.regions.crossings import rollout_facts, store_of, traffic, weight_facts
from scripts.regions.layout import Regions, Way, planned
from storage.layout import iteration_record, lease, policy_folder, run_record, shard_folder
from storage.policies import DELTA_PART, LocalPolicy, Policy, publish_policy
from storage.policy_copies import publish_copy
from storage.policy_deltas import delta_file, open_delta
from storage.policy_fetch import fetch_policy
from storage.replication import replicate_iteration
from storage.rollouts import write_rollouts
from tests.helpers.storage_builders import RUN, rollout_rows

CLUSTER = """
format: motley.cluster/1
name: two-regions
machines:
  - {name: east-0, region: east, gpu: cpu, count: 1}
  - {name: west-0, region: west, gpu: cpu, count: 1}
links: {regions: [{between: [east, west], latency_ms: 30, bandwidth_gbps: 0.2}]}
storage: {east: s3://rl-east/runs, west: s3://rl-west/runs}
"""


@pytest.fixture
def layout(tmp_path: Path) -> Regions:
    found = planned(load_cluster(CLUSTER, "cluster"), tmp_path, "loopback")
    for way in found.ways:
        found.region(way.asker).folder.mkdir(exist_ok=True)
        found.journal(way).touch()
    return found


def way(layout: Regions, asker: str) -> Way:
    return next(one for one in layout.ways if one.asker == asker)


def note(layout: Regions, asker: str, method: str, key: str, length: int | None) -> None:
    peer = layout.region(way(layout, asker).peer)
    line = {
        "method": method, "path": f"/{peer.root.removeprefix('s3://')}/{key}?versionId=null", "length": None,
        "sent_bytes": 0, "status": 200, "received_bytes": length,
    }  # fmt: skip
    with layout.journal(way(layout, asker)).open("a") as file:
        file.write(json.dumps(line) + "\n")


def policies(layout: Regions, folder: Path) -> list[Policy]:
    """Publish versions 0 and 1 at home and copy version 1 into the west, whole, and 2 as a delta."""
    home, west = (store_of(region) for region in layout.regions)
    values, base, found, near = np.arange(5000, dtype=np.float32), None, [], None
    for version in range(3):
        values[version::1001] += 1
        (folder / str(version)).mkdir(parents=True)
        (folder / str(version) / "model.safetensors").write_bytes(save({"w": values}))
        files = {"model.safetensors": folder / str(version) / "model.safetensors"}
        policy = publish_policy(home, RUN, version, files, created_by="t", base=base)
        base = LocalPolicy(policy, folder / str(version))
        found.append(policy)
        if version:
            open_delta(home, policy, folder)
            delta = delta_file(policy, folder)
            near = publish_copy(west, base, policy, delta=delta, base=near, created_by="t")
    assert fetch_policy([west], found[2], folder / "fetched").form == "deltas"
    return found


def test_versions_say_what_of_them_crossed_and_how_the_region_holds_them(layout: Regions, tmp_path: Path) -> None:
    first, _, last = policies(layout, tmp_path / "files")
    key = f"{policy_folder(RUN, 0)}/{first.manifest.attempt}/model.safetensors"
    note(layout, "west", "GET", key, 15_000)
    note(layout, "west", "GET", key, 5_000)
    note(layout, "west", "HEAD", key, None)
    note(layout, "west", "GET", f"{policy_folder(RUN, 0)}/manifest.json", None)
    note(layout, "west", "GET", last.manifest.part(DELTA_PART).path, last.manifest.part(DELTA_PART).size)
    note(layout, "east", "GET", last.manifest.part(DELTA_PART).path, 10)
    facts = weight_facts(layout, RUN, 2)
    assert [fact["form_in_region"] for fact in facts] == [None, "whole", "delta"]
    assert [fact["crossed_bytes"] for fact in facts] == [
        {"model.safetensors": 20_000}, {}, {DELTA_PART: last.manifest.part(DELTA_PART).size},
    ]  # fmt: skip


def test_rows_are_counted_where_they_lie_by_who_made_them(layout: Regions, tmp_path: Path) -> None:
    east, west = (store_of(region) for region in layout.regions)
    for shard, (store, region) in enumerate([(east, "east"), (west, "west")]):
        rows = [{**row, "region": region} for row in rollout_rows(range(2 * shard, 2 * shard + 2))]
        write_rollouts(store, RUN, 0, shard, 2, rows, input_fingerprint="f", created_by="t")
    note(layout, "east", "GET", f"{shard_folder(RUN, 0, 'rollouts', 1)}/a/rows.parquet", 700)
    before = rollout_facts(layout, RUN, 1)
    assert [(fact["rows_by_maker"], fact["bytes_read_elsewhere"]) for fact in before] == [
        ({"east": 4}, 700), ({"west": 4}, 0),
    ]  # fmt: skip
    replicate_iteration([east], west, RUN, 0, tmp_path / "work", created_by="t")
    assert [fact["rows_by_maker"] for fact in rollout_facts(layout, RUN, 1)] == [{"east": 4}, {"east": 4, "west": 4}]


def test_traffic_is_told_apart_by_kind_of_object(layout: Regions, tmp_path: Path) -> None:
    policy, folder = policies(layout, tmp_path / "files")[1], policy_folder(RUN, 1)
    for key, size in (
        (policy.manifest.part(DELTA_PART).path, 10), (f"{folder}/{policy.manifest.attempt}/model.safetensors", 200),
        (f"{folder}/{policy.manifest.attempt}/config.json", 30), (f"{folder}/manifest.json", 4),
        (f"{shard_folder(RUN, 0, 'rollouts', 1)}/a/rows.parquet", 700), (iteration_record(RUN, 0), 50),
        (lease(RUN, "h"), 60), (run_record(RUN), 5), (f"{folder}/fence/claim", 9), ("_probe/x", None),
    ):  # fmt: skip
        note(layout, "west", "GET", key, size)
    found = traffic(layout.journal(way(layout, "west")))
    assert {kind: (one.read_bytes, one.num_requests) for kind, one in found.items()} == {
        "policy, delta": (10, 1), "policy, whole weights": (200, 1), "policy, manifests and others": (34, 2),
        "rows": (700, 1), "records and plans": (55, 2), "leases": (60, 1), "fences and probes": (None, 2),
    }  # fmt: skip


def test_fence_of_attempts_is_no_file_of_a_version(layout: Regions, tmp_path: Path) -> None:
    policies(layout, tmp_path / "files")
    note(layout, "west", "GET", f"{policy_folder(RUN, 1)}/fence/claim", 9)
    assert [fact["crossed_bytes"] for fact in weight_facts(layout, RUN, 2)] == [{}, {}, {}]
