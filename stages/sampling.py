"""Sampling of rollout shards on this machine's generation engines; shared by training rollouts and evaluation.

Every row's seed follows from its identity, every shard is committed by itself, and a retry makes missing shards only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

from plans.workflow import RlTask
from stages.context import StageContext
from stages.engines.client import RemoteEngine
from stages.engines.protocol import Completion, EngineInfo, GenerationRequest
from stages.errors import EngineError, EngineUnavailableError, WeightMismatchError
from stages.prompts import Prompts
from stages.shard_writer import RolloutBatch, ShardWriter
from stages.sharding import ShardRange, local_replicas, shard_ranges, shards_by_replica, waves
from storage.manifest import Manifest
from storage.policies import Policy

_MAX_RELOADS_IN_CALL: Final = 3
"""Engine calls repeated because other weights were loaded around them (asynchronous weight sync)."""


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
    """Sums over the rows sampled now: rows, tokens, truncated; and seconds in engine calls."""


def sample_shards(
    context: StageContext,
    batch: RolloutBatch,
    prompts: Prompts,
    policy: Policy,
    *,
    replicas: Sequence[int] | None = None,
) -> SampledShards:
    """Make, or find, this machine's shards of a batch.

    Args:
        context: The stage.
        batch: What to sample.
        prompts: Tokenizer and fingerprints.
        policy: Policy version to load where an engine holds another one.
        replicas: Generation replicas that share the batch; absent means all of the plan, on all machines.

    Raises:
        EngineUnavailableError: an engine died; shards that were committed before stay.
        WeightMismatchError: an engine holds weights that the batch does not allow.
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
    stats: dict[str, float] = {"rows": 0, "tokens": 0, "truncated": 0, "engine_s": 0.0}
    info = None
    if missing:
        engines = _engines(context, list(missing), policy)
        with context.phase("generate"):
            made, stats, info = _sample_in_threads(writer, engines, missing)
        found.update(made)
    manifests = [found[index] for index in sorted(found)]
    return SampledShards(manifests=manifests, num_reused=num_reused, num_shards=len(ranges), info=info, stats=stats)


def _engines(context: StageContext, replicas: Sequence[int], policy: Policy) -> dict[int, RemoteEngine]:
    pool = context.engines
    with context.phase("engines"):
        if len(replicas) == 1:
            return {replicas[0]: pool.generation(replicas[0], policy)}
        executor = ThreadPoolExecutor(max_workers=len(replicas), thread_name_prefix="acquire")
        try:
            return dict(zip(replicas, executor.map(lambda r: pool.generation(r, policy), replicas), strict=True))
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _sample_in_threads(
    writer: ShardWriter, engines: Mapping[int, RemoteEngine], missing: Mapping[int, Sequence[ShardRange]]
) -> tuple[dict[int, Manifest], dict[str, float], EngineInfo | None]:
    made: dict[int, Manifest] = {}
    totals: dict[str, float] = {"rows": 0, "tokens": 0, "truncated": 0, "engine_s": 0.0}
    executor = ThreadPoolExecutor(max_workers=len(engines), thread_name_prefix="generate")
    try:
        futures = [executor.submit(_sample_replica, writer, engines[r], r, missing[r]) for r in sorted(missing)]
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
    writer: ShardWriter, engine: RemoteEngine, replica: int, shards: Sequence[ShardRange]
) -> tuple[dict[int, Manifest], dict[str, float], EngineInfo]:
    """Sample the shards of one replica, in engine calls of at most its decode batch; runs in a thread of its own."""
    context, batch = writer.context, writer.batch
    placed = context.plan.tasks[RlTask.ACTOR_GENERATION].replicas[replica]
    room = placed.decode_batch or context.job.planner.generation.max_num_seqs
    made: dict[int, Manifest] = {}
    stats: dict[str, float] = {"rows": 0, "tokens": 0, "truncated": 0, "engine_s": 0.0}
    info = engine.info()
    for wave in waves(shards, batch.samples_per_prompt, room):
        requests = [request for shard in wave for request in writer.requests(shard)]
        start = context.clock.now()
        completions, info = _generate(engine, requests, batch)
        end = context.clock.now()
        position = 0
        for shard in wave:
            size = (shard.stop - shard.first) * batch.samples_per_prompt
            part = completions[position : position + size]
            position += size
            made[shard.shard] = writer.commit(shard, part, info, (start, end))
        stats["rows"] += len(completions)
        stats["tokens"] += sum(len(completion.token_ids) for completion in completions)
        stats["truncated"] += sum(completion.finish_reason == "length" for completion in completions)
        stats["engine_s"] += end - start
    return made, stats, info


def _generate(
    engine: RemoteEngine, requests: Sequence[GenerationRequest], batch: RolloutBatch
) -> tuple[list[Completion], EngineInfo]:
    """Sample, and say with which weights: those that the engine held both before and after the call."""
    for _ in range(_MAX_RELOADS_IN_CALL):
        before = engine.info()
        version = before.policy_version
        if version is None or not batch.oldest_version <= version <= batch.newest_version:
            raise WeightMismatchError(
                f"{engine.record.describe()} holds policy version {version}, but {batch.split.value} batch "
                f"{batch.number} is sampled from versions {batch.oldest_version} to {batch.newest_version}; repeat the "
                "stage, which loads the right ones.",
                policy_version=version,
            )
        completions = engine.generate(requests)
        after = engine.info()
        if (after.policy_version, after.weights_hash) == (version, before.weights_hash):
            _check_completions(requests, completions, engine)
            return completions, after
    raise EngineUnavailableError(
        f"{engine.record.describe()} got other weights during {_MAX_RELOADS_IN_CALL} calls in a row, so it is unknown "
        "which ones sampled; repeat the stage when the weight sync is over."
    )


def _check_completions(
    requests: Sequence[GenerationRequest], completions: Sequence[Completion], engine: RemoteEngine
) -> None:
    """Refuse answers that break the protocol, before they are stored."""
    faults = (
        [] if len(requests) == len(completions) else [f"{len(completions)} completions for {len(requests)} requests"]
    )
    for index, (request, completion) in enumerate(zip(requests, completions, strict=False)):
        ids = completion.token_ids
        if not ids or len(ids) > request.max_tokens or len(ids) != len(completion.logprobs):
            faults.append(
                f"completion {index} has {len(ids)} tokens and {len(completion.logprobs)} log-probs, of at most "
                f"{request.max_tokens}"
            )
        elif completion.finish_reason == "stop" and ids[-1] not in request.stop_token_ids:
            faults.append(f"completion {index} says stop, but ends in token {ids[-1]}, which is no end token")
    if faults:
        raise EngineError(
            f"{engine.record.describe()} broke its contract in {len(faults)} places: {'; '.join(faults[:3])}.",
            faults=faults[:20],
        )


def shard_keys(sampled: SampledShards) -> list[str]:
    """Return the manifest keys of a machine's shards."""
    return [manifest.key for manifest in sampled.manifests]
