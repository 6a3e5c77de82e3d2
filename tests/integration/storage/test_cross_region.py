"""Two regions on two real S3 servers with credentials of their own, and a shaped, failing link between them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from scripts.regions.tcp_proxy import Shape, TcpProxy, tcp_proxy
from stages import replicate, weight_sync
from stages.context import StageContext
from stages.contract import StageRequest
from stages.plan import ensure_plan
from stages.policy_files import files_of, policy_directory
from stages.runs import ResolvedRun, create_run, resolve_run
from stages.timing import Clock, Deadline, PhaseTimer
from storage.manifest import Part
from storage.policies import LocalPolicy, Policy, publish_policy, resolve_policy
from storage.rollouts import read_rollouts, write_rollouts
from storage.store import Store, open_store
from storage.store_options import OPTIONS_VARIABLE
from storage.transfer import Link, fetch_part
from storage.weights_hash import weights_hash
from tests.helpers.s3_server import S3Server, s3_server
from tests.helpers.stage_contexts import CLUSTER, JOB
from tests.helpers.storage_builders import rollout_rows

pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True, slots=True)
class Regions:
    """Home region a, region b, and the link from b to a."""

    run: ResolvedRun
    a: S3Server
    b: S3Server
    link: TcpProxy
    base: Path


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Regions]:
    base = tmp_path_factory.mktemp("regions")
    shape = Shape(delay_s=0.005, bytes_per_s=20e6)
    with (
        s3_server(base / "a", "bucket-a") as a,
        s3_server(base / "b", "bucket-b") as b,
        tcp_proxy(a.port, shape) as link,
        pytest.MonkeyPatch.context() as patch,
    ):
        # Region a is opened through the link, b directly; no document ever holds one of the secrets.
        options = {"s3://bucket-a": a.options(link.port), "s3://bucket-b": b.options()}
        patch.setenv(OPTIONS_VARIABLE, json.dumps(options))
        cluster = CLUSTER.format(base="X").replace("X/a", "s3://bucket-a/rl").replace("X/b", "s3://bucket-b/rl")
        run = resolve_run(JOB, cluster, "r", 5, None, "s3://bucket-a/rl")
        create_run(run)
        yield Regions(run, a, b, link, base)


def _context(regions: Regions, stage: str, iteration: int, machine: str, **params: Any) -> StageContext:
    root = regions.run.roots[machine[0]]
    request = StageRequest.model_validate(
        {
            "stage": stage, "run": "r", "iteration": iteration, "root": root, "machine": machine,
            "state_dir": str(regions.base / f"state-{machine}"), "attempt": f"a-{stage}-{iteration}", "params": params,
        }
    )  # fmt: skip
    clock = Clock()
    deadline = Deadline(clock=clock, ends_at=clock.monotonic() + 1500)
    context = StageContext(request, regions.run, PhaseTimer(clock=clock), deadline)
    ensure_plan(StageContext(request.model_copy(update={"iteration": 0}), regions.run, context.timer, deadline))
    ensure_plan(context)
    return context


def _publish(store: Store, folder: Path, versions: int) -> Policy:
    values = np.arange(500_000, dtype=np.float32)
    base = None
    for version in range(versions):
        values[version::10_007] += 1
        files = {"model.safetensors": save({"w": values}), "config.json": b"{}"}
        policy = publish_policy(store, "r", version, files, created_by="t", base=base)
        (folder / str(version)).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / str(version) / name).write_bytes(data)
        base = LocalPolicy(policy, folder / str(version))
    return policy


def test_weights_cross_the_link_once_and_as_deltas(regions: Regions, tmp_path: Path) -> None:
    _publish(open_store("s3://bucket-a/rl", **regions.a.options()), tmp_path, 3)
    forms, sizes = [], []
    for k in range(2):
        before = regions.link.num_bytes
        outcome = weight_sync.run_stage(_context(regions, "weight_sync", k, "b0", region="b"))
        forms.append(outcome.metrics["form"])
        sizes.append(regions.link.num_bytes - before)
        if k == 0:  # the head is 2 already: go on with a version that follows it
            _publish(open_store("s3://bucket-a/rl", **regions.a.options()), tmp_path, 4)
    assert forms == ["whole", "deltas"]
    assert sizes[1] < sizes[0] / 10
    region = open_store("s3://bucket-b/rl")
    assert [resolve_policy(region, "r", version).is_whole for version in (2, 3)] == [True, False]
    before = regions.link.num_bytes
    reader = _context(regions, "generate", 3, "b0")
    policy = resolve_policy(reader.home, "r", 3)
    assert weights_hash(files_of(policy_directory(reader, policy))) == policy.weights_hash
    assert regions.link.num_bytes - before < sizes[0] / 10


def test_lost_connection_is_survived_and_costs_only_what_was_on_the_way(regions: Regions, tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(6 << 20)
    near = open_store("s3://bucket-a/rl", **regions.a.options())
    near.publish("r/object", data)
    part = Part(name="o", path="r/object", size=len(data), sha256=hashlib.sha256(data).hexdigest())
    far = open_store("s3://bucket-a/rl")
    cuts, before = regions.link.num_cuts, regions.link.num_bytes
    regions.link.shape.cut_after_bytes = before + (3 << 20)

    fetch_part(far, part, tmp_path / "o", Link(num_readers=2, range_bytes=1 << 20))

    assert (tmp_path / "o").read_bytes() == data
    assert regions.link.num_cuts == cuts + 1
    assert regions.link.num_bytes - before < len(data) + (6 << 20)


def test_rows_of_the_other_region_are_replicated(regions: Regions) -> None:
    write_rollouts(
        open_store("s3://bucket-a/rl", **regions.a.options()), "r", 0, 0, 1, rollout_rows(range(4)),
        input_fingerprint="f", created_by="t",
    )  # fmt: skip
    context = _context(regions, "replicate", 0, "b0")
    assert replicate.run_stage(context).metrics["copied"] == 1
    assert replicate.run_stage(context).reused
    assert read_rollouts(open_store("s3://bucket-b/rl"), "r", 0).num_rows == 8


def test_no_object_holds_a_secret(regions: Regions) -> None:
    for server in (regions.a, regions.b):
        for path in regions.base.rglob("*"):
            if path.is_file():
                assert server.secret.encode() not in path.read_bytes(), path
