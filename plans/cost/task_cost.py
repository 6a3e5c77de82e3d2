"""Cost of one task on a placement, formula by formula (HetRL v1, Appendix B and the Psi of section 4).

This is the readable implementation that `price` uses. `plans.cost.evaluator` computes the same numbers for
searches; a test holds the two together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from plans.cost.collectives import LinkTimes
from plans.cost.sharing import fullest_link_s
from plans.cost.terms import DecodeTerms, TaskTerms
from plans.spec.cluster import ClusterView


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """One pipeline stage of a replica."""

    layers: int
    """Layers on the stage."""
    gpus: tuple[int, ...]
    """GPU indices of the TP shards."""


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """One replica of a task, by GPU index."""

    samples: int
    """Samples per iteration."""
    micro_batch_size: int
    """Samples per micro-batch."""
    stages: tuple[StagePlacement, ...]
    """Pipeline stages."""
    decode_batch: int = 1
    """Sequences decoded together (generation only)."""

    @property
    def micro_batches(self) -> int:
        """nm: micro-batches per iteration."""
        return math.ceil(self.samples / self.micro_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCost:
    """Seconds of one task: the model's aggregate and its components (each a maximum of its own)."""

    total_s: float
    """Psi: the cost of the task."""
    comp_s: float
    """Largest C_comp of a stage."""
    hbm_s: float
    """Largest C_hbm of a stage."""
    tp_s: float
    """Largest C_tp of a stage."""
    pp_s: float
    """Largest C_pp of a stage."""
    dp_s: float
    """Largest C_dp of a gradient ring."""
    bubble_s: float
    """Largest pipeline bubble of a replica."""
    replica_s: tuple[float, ...]
    """Cost of each replica before the gradient all-reduce."""
    bottleneck: tuple[int, int]
    """Replica and stage that decide the cost."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one stage of one replica."""

    comp_s: float
    hbm_s: float
    tp_s: float
    pp_s: float
    flow_s: float
    """Part that fills the pipeline: compute, TP and PP of the micro-batches, without decoding."""

    @property
    def total_s(self) -> float:
        """Sum of the components: the stage's time."""
        return self.comp_s + self.tp_s + self.pp_s + self.hbm_s


def task_cost(terms: TaskTerms, view: ClusterView, links: LinkTimes, replicas: Sequence[ReplicaPlacement]) -> TaskCost:
    """Return Psi of a task: max over replicas of (slowest stage + bubble), plus the gradient all-reduce."""
    stages = [[stage_cost(terms, view, links, replica, j) for j in range(len(replica.stages))] for replica in replicas]
    bubbles = [bubble_s(terms, replica, costs) for replica, costs in zip(replicas, stages, strict=True)]
    slowest = [max(cost.total_s for cost in costs) for costs in stages]
    replica_s = tuple(slow + bubble for slow, bubble in zip(slowest, bubbles, strict=True))
    dp_s = gradient_s(terms, view, links, replicas) if terms.is_training else 0.0
    worst = max(range(len(replicas)), key=replica_s.__getitem__)
    flat = [cost for costs in stages for cost in costs]
    return TaskCost(
        total_s=replica_s[worst] + dp_s,
        comp_s=max(cost.comp_s for cost in flat),
        hbm_s=max(cost.hbm_s for cost in flat),
        tp_s=max(cost.tp_s for cost in flat),
        pp_s=max(cost.pp_s for cost in flat),
        dp_s=dp_s,
        bubble_s=max(bubbles),
        replica_s=replica_s,
        bottleneck=(worst, max(range(len(stages[worst])), key=lambda j: stages[worst][j].total_s)),
    )


def stage_cost(
    terms: TaskTerms, view: ClusterView, links: LinkTimes, replica: ReplicaPlacement, stage: int
) -> StageCost:
    """Return the components of one stage; maxima over its TP shards."""
    here = replica.stages[stage]
    is_last = stage == len(replica.stages) - 1
    tp, mbs, micro_batches = len(here.gpus), replica.micro_batch_size, replica.micro_batches
    samples = float(micro_batches * mbs if terms.pads_micro_batches else replica.samples)
    gpus = list(here.gpus)
    flop_per_s = float(terms.compute_flop_per_s[gpus].min())
    comp = terms.compute_s(samples, here.layers, is_last=is_last, tp=tp, flop_per_s=flop_per_s)
    machines = _machines(view, here.gpus)
    tp_s = pp_s = hbm = 0.0
    if tp > 1:
        tp_s = terms.tp_count * micro_batches * here.layers * links.ring_s(machines, terms.tp_bytes(mbs, tp))
    if not is_last:
        following = frozenset(_machines(view, replica.stages[stage + 1].gpus))
        pp_s = terms.pp_count * micro_batches * links.pair_s(frozenset(machines), following, terms.pp_bytes(mbs))
    flow = comp + tp_s + pp_s
    if terms.decode is not None:
        decode = terms.decode
        steps = decode.steps(samples, replica.decode_batch)
        hbm = steps * decode_step_s(terms, decode, replica, stage)
        groups = decode.groups(len(replica.stages))
        group_bytes = replica.decode_batch / groups * decode.token_bytes
        if tp > 1 and decode.tp_count:
            ring = links.ring_s(machines, group_bytes * (2.0 * (tp - 1) / tp))
            tp_s += steps * groups * decode.tp_count * here.layers * ring
        if not is_last and decode.token_bytes:
            following = frozenset(_machines(view, replica.stages[stage + 1].gpus))
            pp_s += steps * groups * links.pair_s(frozenset(machines), following, group_bytes)
    return StageCost(comp_s=comp, hbm_s=hbm, tp_s=tp_s, pp_s=pp_s, flow_s=flow)


def decode_step_s(terms: TaskTerms, decode: DecodeTerms, replica: ReplicaPlacement, stage: int) -> float:
    """Return seconds of one decode step of the whole batch on a stage: the slower of memory reads and compute.

    Paper mode: layers * weight bytes / (HBM * TP). Calibrated: weights are read, and overhead is paid, once per group.
    """
    here = replica.stages[stage]
    is_last, tp, batch = stage == len(replica.stages) - 1, len(here.gpus), replica.decode_batch
    gpus, groups = list(here.gpus), decode.groups(len(replica.stages))
    weights = groups * (here.layers * decode.layer_bytes + decode.head_bytes * is_last) / tp
    cache = batch * here.layers * decode.cache_bytes / min(tp, decode.kv_heads)
    memory_s = (weights + cache) / float(terms.hbm_bytes_per_s[gpus].min())
    work = batch * (here.layers * decode.layer_flop + decode.head_flop * is_last) / tp
    compute_s = work / float(terms.compute_flop_per_s[gpus].min())
    return max(memory_s, compute_s) + groups * here.layers * float(decode.layer_overhead_s[gpus].max())


def bubble_s(terms: TaskTerms, replica: ReplicaPlacement, stages: Sequence[StageCost]) -> float:
    """Return C_bubble of a replica: sum over stages but the first of (comp + tp + pp) / nm, once per update."""
    if not terms.has_bubble:
        return 0.0
    return terms.updates * sum(cost.flow_s for cost in stages[1:]) / replica.micro_batches


def gradient_s(terms: TaskTerms, view: ClusterView, links: LinkTimes, replicas: Sequence[ReplicaPlacement]) -> float:
    """Return C_dp: the slowest gradient ring, max over stages and shards, once per update.

    Replicas whose stages cut the layers at different places are handled by cutting at every boundary of any
    replica: each piece has its rings, and a stage pays for all pieces it holds (reconstruction). With different TP
    degrees the finest one decides the shards, and a GPU that holds several shards pays for each. The calibrated
    model also waits for the fullest link (`plans.cost.sharing`).
    """
    if len(replicas) == 1:
        return 0.0
    paid: dict[tuple[int, int], float] = {}
    rings: Counter[tuple[tuple[int, ...], float]] = Counter()
    for first, last in _layer_pieces(replicas):
        holders = [_stage_holding(replica, first) for replica in replicas]
        gpu_sets = [replica.stages[stage].gpus for replica, stage in zip(replicas, holders, strict=True)]
        piece = _piece_rings(terms, view, gpu_sets, first, last)
        repeats = max(map(len, gpu_sets)) / min(map(len, gpu_sets))
        seconds = repeats * max(links.ring_s(*ring) for ring in piece)
        for i, stage in enumerate(holders):
            paid[i, stage] = paid.get((i, stage), 0.0) + seconds
        rings.update(piece)
    slowest = max(paid.values())
    if terms.shares_links:
        slowest = max(slowest, fullest_link_s(links, rings))
    return terms.updates * slowest


def _piece_rings(
    terms: TaskTerms, view: ClusterView, gpu_sets: Sequence[tuple[int, ...]], first: int, last: int
) -> list[tuple[tuple[int, ...], float]]:
    """Return the ring of each shard of layers [first, last): its machines, sorted, and the bytes over its edges."""
    finest = max(len(gpus) for gpus in gpu_sets)
    weight_bytes = terms.stage_gradient_bytes(last - first, is_first=first == 0, is_last=last == terms.num_layers)
    num_bytes = terms.dp_bytes(weight_bytes, len(gpu_sets), finest)
    shards = [[gpus[k * len(gpus) // finest] for gpus in gpu_sets] for k in range(finest)]
    return [(_machines(view, shard), num_bytes) for shard in shards]


def _layer_pieces(replicas: Sequence[ReplicaPlacement]) -> list[tuple[int, int]]:
    cuts = {0}
    for replica in replicas:
        position = 0
        for stage in replica.stages:
            position += stage.layers
            cuts.add(position)
    ordered = sorted(cuts)
    return list(pairwise(ordered))


def _stage_holding(replica: ReplicaPlacement, layer: int) -> int:
    position = 0
    for index, stage in enumerate(replica.stages):
        position += stage.layers
        if layer < position:
            return index
    raise IndexError(f"layer {layer} is beyond the replica's {position} layers")


def _machines(view: ClusterView, gpus: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(int(view.machine_of[gpu]) for gpu in gpus))
