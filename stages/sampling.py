"""Sampling of rollout shards on this machine's generation engines; shared by training rollouts and evaluation.

Every row's seed follows from its identity, every shard is committed by itself, and a retry makes missing shards only.
Where several policy versions are allowed, each engine call starts with the newest committed one; a completion that new
weights interrupt goes on under those, and the version of every token is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass

from plans.workflow import RlTask
from stages.context import StageContext
from stages.dynamic_sampling import GroupSet, RuleJudge, SampledGroup, fill
from stages.engines.client import RemoteEngine
from stages.engines.protocol import EngineInfo, GenerationRequest
from stages.errors import StaleRolloutError
from stages.partial_rollouts import Sampled, sample_all
from stages.policy_files import policy_at_home
from stages.prompts import EncodedRow, Prompts
from stages.shard_writer import RolloutBatch, ShardWriter
from stages.sharding import ShardRange, local_replicas, shard_ranges, shards_by_replica, waves
from storage.manifest import Manifest
from storage.policies import Policy, head_version


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledShards:
    """What this machine contributed."""

    manifests: Sequence[Manifest]
    """Manifests of its shards, in shard order."""
    num_reused: int
    """Shards that an earlier attempt had committed."""
    num_shards: int
    """Shards of the whole batch, on all machines."""
    info: EngineInfo | None
    """The engine that sampled; None when nothing was sampled."""
    stats: Mapping[str, float]
    """Sums over the rows sampled now: rows, tokens, truncated, interrupted, groups of further prompts; and seconds in
    engine calls."""


def sample_shards(
    context: StageContext,
    batch: RolloutBatch,
    prompts: Prompts,
    *,
    replicas: Sequence[int] | None = None,
) -> SampledShards:
    """Make, or find, this machine's shards of a batch.

    Args:
        context: The stage.
        batch: What to sample.
        prompts: Tokenizer and fingerprints.
        replicas: Generation replicas that share the batch; absent means all of the plan, on all machines.

    Raises:
        EngineUnavailableError: an engine died; shards that were committed before stay.
        WeightMismatchError: an engine sampled from weights that the batch does not allow.
        StaleRolloutError: no policy version that the batch allows is committed yet.
    """
    task = context.plan.tasks[RlTask.ACTOR_GENERATION]
    ranges = shard_ranges(len(batch.prompts), context.job.prompts_per_shard)
    sharing = list(replicas) if replicas is not None else list(range(len(task.replicas)))
    dealt = dict(zip(sharing, shards_by_replica(len(ranges), [task.replicas[r].samples for r in sharing]), strict=True))
    writer = ShardWriter(context, batch, prompts, len(ranges))
    found: dict[int, Manifest] = {}
    missing: dict[int, list[ShardRange]] = {}
    with context.phase("find_shards"):
        for replica in local_replicas(task, context.machine.name):
            for index in dealt.get(replica, ()):
                manifest = writer.find(ranges[index])
                if manifest is not None:
                    found[index] = manifest
                else:
                    missing.setdefault(replica, []).append(ranges[index])
    num_reused = len(found)
    stats, info = dict(_NO_STATS), None
    if missing:
        with context.phase("engines"):
            _start_engines(context, batch, list(missing))
        with context.phase("generate"):
            made, stats, info = _sample_in_threads(writer, missing)
        found.update(made)
    manifests = [found[index] for index in sorted(found)]
    return SampledShards(manifests=manifests, num_reused=num_reused, num_shards=len(ranges), info=info, stats=stats)


def policy_for(context: StageContext, batch: RolloutBatch) -> Policy:
    """Return the newest committed policy version that may sample a batch.

    Raises:
        StaleRolloutError: none is committed yet; the gate in front of the stage was passed too early.
    """
    head = head_version(context.home, context.run.name)
    if head is None or head < batch.oldest_version:
        raise StaleRolloutError(
            f"run {context.run.name}: {batch.split.value} batch {batch.number} is sampled from policy version "
            f"{batch.oldest_version} or later, but the newest committed one is {head}; commit the earlier iterations "
            f"first (max_staleness is {context.job.max_staleness}).",
            head=head,
            oldest=batch.oldest_version,
        )
    # An iteration that is repeated later must not sample from a policy that has learned from it.
    return policy_at_home(context, min(head, batch.newest_version))


def _start_engines(context: StageContext, batch: RolloutBatch, replicas: Sequence[int]) -> None:
    """Start the engines of all replicas side by side and load the weights, so that this time is told apart."""
    executor = ThreadPoolExecutor(max_workers=len(replicas), thread_name_prefix="acquire")
    try:
        list(executor.map(lambda r: context.engines.generation(r, lambda: policy_for(context, batch)), replicas))
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


_NO_STATS: Mapping[str, float] = dict.fromkeys(
    ("rows", "tokens", "truncated", "interrupted", "engine_s", "further_groups"), 0.0
)


def _sample_in_threads(
    writer: ShardWriter, missing: Mapping[int, Sequence[ShardRange]]
) -> tuple[dict[int, Manifest], dict[str, float], EngineInfo | None]:
    made: dict[int, Manifest] = {}
    totals = dict(_NO_STATS)
    executor = ThreadPoolExecutor(max_workers=len(missing), thread_name_prefix="generate")
    try:
        futures = [executor.submit(_sample_replica, writer, r, missing[r]) for r in sorted(missing)]
        wait(futures, return_when=FIRST_EXCEPTION)
        info = None
        for future in futures:
            if future.done():  # the first failed one raises here
                shards, stats, info = future.result()
                made.update(shards)
                totals = {name: totals[name] + stats[name] for name in totals}
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
    return made, totals, info


def _sample_replica(
    writer: ShardWriter, replica: int, shards: Sequence[ShardRange]
) -> tuple[dict[int, Manifest], dict[str, float], EngineInfo]:
    """Sample the shards of one replica, in engine calls of at most its decode batch; runs in a thread of its own."""
    context, batch, pool = writer.context, writer.batch, writer.context.engines
    placed = context.plan.tasks[RlTask.ACTOR_GENERATION].replicas[replica]
    room = placed.decode_batch or context.job.planner.generation.max_num_seqs
    made: dict[int, Manifest] = {}
    stats = dict(_NO_STATS)

    def newest() -> RemoteEngine:
        return pool.generation(replica, lambda: policy_for(context, batch))

    with ExitStack() as stack:
        if batch.is_pinned:
            pinned = stack.enter_context(pool.pinned_generation(replica, lambda: policy_for(context, batch)))
        judge = stack.enter_context(RuleJudge(context.job, writer.prompts.decode)) if batch.max_rounds else None
        sampler = _WaveSampler(writer, (lambda: pinned) if batch.is_pinned else newest, stats)
        for wave in waves(shards, batch.samples_per_prompt, room):
            groups, times = sampler.groups_of(wave, judge)
            for shard, sampled in zip(wave, groups, strict=True):
                made[shard.shard] = writer.commit(shard, sampled, sampler.info, times, replica)
    return made, stats, sampler.info


class _WaveSampler:
    """Samples the groups of some shards in common engine calls."""

    def __init__(self, writer: ShardWriter, engine: Callable[[], RemoteEngine], stats: dict[str, float]) -> None:
        self.writer, self.engine, self.stats = writer, engine, stats
        self.info = engine().info()

    def groups_of(
        self, wave: Sequence[ShardRange], judge: RuleJudge | None
    ) -> tuple[list[list[SampledGroup]], tuple[float, float]]:
        """Return the groups of each shard, and when they were sampled.

        With a judge, groups without signal are joined by groups of further prompts.
        """
        clock = self.writer.context.clock
        start = clock.now()
        entries = [self.writer.entries_of(shard) for shard in wave]
        groups, place, first = self.sample([entry for part in entries for entry in part]), 0, []
        for part in entries:
            first.append(groups[place : place + len(part)])
            place += len(part)
        if judge is None:
            return first, (start, clock.now())
        sets = [GroupSet(len(part), self.writer.further_of(s)) for part, s in zip(entries, wave, strict=True)]
        fill(sets, first, self.sample, judge, self.writer.batch.max_rounds)
        self.stats["further_groups"] += sum(len(shard.groups) for shard in sets) - len(groups)
        return [shard.groups for shard in sets], (start, clock.now())

    def sample(self, entries: Sequence[tuple[int, EncodedRow]]) -> list[SampledGroup]:
        """Sample groups of prompts in one engine call."""
        requests = self.writer.requests([prompt for _, prompt in entries])
        done, self.info = _timed(self.writer, self.engine, requests, self.stats)
        return self.writer.groups(entries, done.rows)


@dataclass(frozen=True, slots=True)
class _Wave:
    rows: Sequence[Sampled]
    times: tuple[float, float]


def _timed(
    writer: ShardWriter,
    engine: Callable[[], RemoteEngine],
    requests: Sequence[GenerationRequest],
    stats: dict[str, float],
) -> tuple[_Wave, EngineInfo]:
    """Sample a wave and add it to the stats."""
    context, batch = writer.context, writer.batch
    info = engine().info()
    start = context.clock.now()
    rows = sample_all(engine, requests, batch, context.deadline)
    end = context.clock.now()
    stats["rows"] += len(rows)
    stats["tokens"] += sum(len(row.token_ids) for row in rows)
    stats["truncated"] += sum(row.finish_reason == "length" for row in rows)
    stats["interrupted"] += sum(len(row.spans) > 1 for row in rows)
    stats["engine_s"] += end - start
    return _Wave(rows, (start, end)), info


def shard_keys(sampled: SampledShards) -> list[str]:
    """Return the manifest keys of a machine's shards."""
    return [manifest.key for manifest in sampled.manifests]
