"""Random schedules of faults over write, replicate, publish, sync, apply, retain and resume.

Nothing is lost, nothing doubled, nothing half-read, every failure is a typed error. The default run is small with a
seed of its own, which is printed; the whole campaign is marked slow (``MOTLEY_CAMPAIGN`` schedules from
``MOTLEY_CAMPAIGN_SEED`` on).
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from storage.checkpoints import load_checkpoint, read_checkpoint_file, save_checkpoint
from storage.errors import StorageError
from storage.manifest import Part, new_attempt
from storage.policies import LocalPolicy, head_version, publish_policy, resolve_policy
from storage.policy_copies import find_copy, publish_copy, send_file
from storage.policy_deltas import delta_file, open_delta
from storage.policy_fetch import fetch_policy
from storage.replication import replicate_iteration
from storage.retention import RetentionRule, apply_retention, collect_orphans
from storage.rollouts import find_shard, read_rollouts, write_rollouts
from storage.runs import IterationRecord, write_iteration
from storage.store import Store
from storage.transfer import Link
from storage.verify import Severity, verify_run
from tests.helpers.dict_store import DictStore
from tests.helpers.fast_fence import fast_fence
from tests.helpers.faulty_store import Crash, Fault, FaultyStore
from tests.helpers.storage_builders import NOW, RUN, new_run, rollout_rows

VERSIONS = 4
ANCHOR_EVERY = 3
SHARDS = 2
MOST_CALLS = 14
"""Faults strike one of the first calls to a store; most operations make about as many."""
LINK = Link(num_readers=1, range_bytes=600)
ROWS = [row["completion_token_ids"] for row in rollout_rows(range(2 * SHARDS))]
DOCUMENTS = ("head.json", "index.json", "retention.json", "run.json")

Operation = Callable[[Store, Store], None]
"""What a stage does with the home store and the region's; looks for its result first."""


def policy_files(version: int) -> dict[str, bytes]:
    values = np.random.default_rng(0).standard_normal(600).astype(np.float16)
    for step in range(1, version + 1):
        values.view(np.uint16)[step::61] += np.uint16(1)
    return {"model.safetensors": save({"w": values}), "config.json": b"{}" if version < 2 else b"{ }"}


FILES = {version: policy_files(version) for version in range(VERSIONS + 1)}
STATE = {"optimizer.bin": b"state" * 50, "rng-0.bin": b"rng"}


class World:
    """Two regions, a machine's disk, and what must come out."""

    def __init__(self, choice: random.Random, folder: Path) -> None:
        is_conditional = choice.random() < 0.7
        self.home, self.region = (DictStore(name, is_conditional=is_conditional) for name in ("home", "region"))
        self.disk = folder
        new_run(self.home)
        new_run(self.region)

    def operations(self) -> Iterator[tuple[str, Operation]]:
        for shard in range(SHARDS):
            yield f"write {shard}", self._write(shard)
        yield "replicate", self._replicate
        for version in range(1, VERSIONS + 1):
            yield f"save {version}", self._save(version)
            yield f"publish {version}", self._publish(version)
            yield f"sync {version}", self._sync(version)
            yield f"retain {version}", self._retain

    def _write(self, shard: int) -> Operation:
        rows = rollout_rows(range(2 * shard, 2 * shard + 2))

        def run(home: Store, region: Store) -> None:
            if find_shard(region, RUN, 0, shard, input_fingerprint="f") is None:
                write_rollouts(region, RUN, 0, shard, SHARDS, rows, input_fingerprint="f", created_by="t")

        return run

    def _replicate(self, home: Store, region: Store) -> None:
        replicate_iteration([region], home, RUN, 0, self.disk / "parts", created_by="t", link=LINK)

    def _save(self, version: int) -> Operation:
        def run(home: Store, region: Store) -> None:
            save_checkpoint(
                home, RUN, version, STATE, config_hash="c", dataset_fingerprint="d", data_position={"index": version},
                rng_files=["rng-0.bin"], created_by="t",
            )  # fmt: skip

        return run

    def _publish(self, version: int) -> Operation:
        def run(home: Store, region: Store) -> None:
            base = None
            if version > 1:
                folder = self.disk / "trainer"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                for name, data in FILES[version - 1].items():
                    (folder / name).write_bytes(data)
                base = LocalPolicy(resolve_policy(home, RUN, version - 1), folder)
            publish_policy(home, RUN, version, FILES[version], created_by="t", base=base)
            write_iteration(home, IterationRecord(run=RUN, iteration=version - 1))

        return run

    def _sync(self, version: int) -> Operation:
        def run(home: Store, region: Store) -> None:
            policy = resolve_policy(home, RUN, version)
            if find_copy(region, policy) is not None:
                return
            bases = [LocalPolicy(resolve_policy(home, RUN, v), self.disk / str(v)) for v in self._cached(home, version)]
            base, attempt, sent = None, new_attempt(), set[str]()
            if policy.delta is not None and version % ANCHOR_EVERY:
                base = find_copy(region, resolve_policy(home, RUN, version - 1))

            def pass_on(part: Part, path: Path) -> None:
                if base is None:
                    send_file(region, policy, part, path, attempt)
                    sent.add(part.name)

            fetched = fetch_policy(
                [home], policy, self.disk / str(version), bases, deltas=self.disk / "deltas", link=LINK, proved=pass_on
            )
            delta = None
            if policy.delta is not None:
                open_delta(home, policy, self.disk / "deltas", LINK)
                delta = delta_file(policy, self.disk / "deltas")
            publish_copy(
                region, fetched.local, policy, delta=delta, base=base, created_by="t", attempt=attempt, sent=sent
            )

        return run

    def _cached(self, home: Store, version: int) -> list[int]:
        return [v for v in range(version - 1, 0, -1) if (self.disk / str(v)).is_dir() and home.exists(_manifest(v))][:1]

    def _retain(self, home: Store, region: Store) -> None:
        rule = RetentionRule(keep_newest=2, keep_every=ANCHOR_EVERY, keep_always=())
        apply_retention(home, RUN, rule, NOW, copies=[region])

    def check_readers(self, choice: random.Random) -> None:
        """Whoever reads gets all of it, or a typed error; one store and two versions each time, for speed."""
        for store in choice.sample((self.home, self.region), 1):
            with suppress(StorageError):
                found = read_rollouts(store, RUN, 0, columns=["completion_token_ids"])
                assert found["completion_token_ids"].to_pylist() == ROWS
            for version in choice.sample(range(1, VERSIONS + 1), 2):
                with suppress(StorageError):
                    assert self._content(store, version) == FILES[version]
        with suppress(StorageError):
            point = load_checkpoint(self.home, RUN)
            assert {name: read_checkpoint_file(self.home, point, name) for name in STATE} == STATE

    def _content(self, store: Store, version: int) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory(dir=self.disk) as name:
            policy = resolve_policy(store, RUN, version)
            folder = fetch_policy([store], policy, Path(name) / "x", link=LINK).local.folder
            return {path.name: path.read_bytes() for path in folder.iterdir()}

    def check_end(self) -> None:
        """Everything that the rules keep is there, once, and whole, in both regions."""
        for store in (self.home, self.region):
            rows = read_rollouts(store, RUN, 0, columns=["row_id", "completion_token_ids"])
            assert rows["completion_token_ids"].to_pylist() == ROWS
            assert len(set(rows["row_id"].to_pylist())) == len(ROWS)
            for version in (VERSIONS - 1, VERSIONS):
                assert self._content(store, version) == FILES[version]
            collect_orphans(store, RUN, now=NOW.replace(year=2999), grace_s=0)
            findings = verify_run(store, RUN).findings
            assert [finding for finding in findings if finding.severity is Severity.ERROR] == []
        assert head_version(self.home, RUN) == VERSIONS
        point = load_checkpoint(self.home, RUN, config_hash="c", dataset_fingerprint="d")
        assert (point.version, point.data_position) == (VERSIONS, {"index": VERSIONS})


def _manifest(version: int) -> str:
    return f"{RUN}/policies/{version}/manifest.json"


def _faulty(store: DictStore, choice: random.Random, again: Callable[[], object]) -> FaultyStore:
    """Wrap a store so that some call goes wrong; single documents are written atomically by contract."""
    fault = choice.choice(list(Fault))
    faulty = FaultyStore(store, choice.randrange(MOST_CALLS), fault, choice.choice((1, 1, 2)), between=again)
    if fault is Fault.TRUNCATE:
        publish, create = store.publish, store.create

        def is_document(key: str) -> bool:
            return key.rpartition("/")[2] in DOCUMENTS or "/leases/" in key

        class Torn(FaultyStore):
            def publish(self, key: str, data: bytes) -> None:
                publish(key, data) if is_document(key) else super().publish(key, data)

            def create(self, key: str, data: bytes) -> bool:
                return create(key, data) if is_document(key) else super().create(key, data)

        return Torn(store, choice.randrange(MOST_CALLS), fault)
    return faulty


def run_schedule(seed: int) -> Counter[str]:
    """Run all operations, each one disturbed up to three times and then repeated until it succeeds."""
    choice = random.Random(seed)
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, fast_fence():
        world = World(choice, Path(name))
        for what, operation in world.operations():
            for _ in range(choice.choice((0, 0, 1, 1, 2, 3))):

                def again(operation: Operation = operation) -> None:
                    operation(world.home, world.region)

                stores = [_faulty(store, choice, again) for store in (world.home, world.region)]
                try:
                    operation(*stores)
                    seen["undisturbed or cured"] += 1
                except (StorageError, Crash) as error:
                    seen[type(error).__name__] += 1
                world.check_readers(choice)
            try:
                operation(world.home, world.region)
            except StorageError as error:
                raise AssertionError(f"schedule {seed}: {what} does not recover: {error!r}") from error
        world.check_end()
    return seen


def test_campaign_of_random_faults() -> None:
    seed = secrets.randbelow(1 << 32)
    print(f"campaign: schedules {seed} to {seed + 11}")  # noqa: T201 - the way to repeat a failure
    seen: Counter[str] = Counter()
    for number in range(seed, seed + 12):
        seen += run_schedule(number)
    assert seen.total() >= 12


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_whole_campaign_of_random_faults() -> None:
    first, count = int(os.environ.get("MOTLEY_CAMPAIGN_SEED", "0")), int(os.environ.get("MOTLEY_CAMPAIGN", "2000"))
    seen: Counter[str] = Counter()
    for number in range(first, first + count):
        seen += run_schedule(number)
    print(f"campaign: {count} schedules from {first}: {dict(seen)}")  # noqa: T201
    assert seen["Crash"] > count
