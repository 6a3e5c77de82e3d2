"""Seconds to move the new actor weights from the training tasklets to the generation tasklets.

C_reshard (sync, same GPUs) and C_sync (other GPUs, or async) are only named by HetRL; this is the reconstruction of
hetrl.md 4.6 on HybridFlow's transition volumes, with three ways of fan-out. The weights are a line of units:
embedding, the layers, head (absent when tied). Stages hold intervals of the line, TP ranks equal fractions of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plans.cost.collectives import LinkTimes
from plans.cost.model import CostModel, Fanout
from plans.spec.cluster import ClusterView
from plans.spec.llm import LlmShape

StageSlots = Sequence[tuple[int, Sequence[int]]]
"""Stages of one replica as (layers, GPU indices)."""

#: A time below another one times this is less by more than rounding.
CLEARLY_LESS = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class WeightLine:
    """Bytes of the actor's weights along the line of units."""

    embedding_bytes: float
    layer_bytes: float
    head_bytes: float
    num_layers: int

    @classmethod
    def of(cls, shape: LlmShape, bytes_per_parameter: int) -> WeightLine:
        """Return the line of a model."""
        embedding = float(bytes_per_parameter * shape.embedding_parameters)
        layer = float(bytes_per_parameter * shape.layer_parameters)
        return cls(embedding, layer, 0.0 if shape.tied else embedding, shape.layers)

    @property
    def total_bytes(self) -> float:
        """M: bytes of all weights."""
        return self.embedding_bytes + self.num_layers * self.layer_bytes + self.head_bytes

    def shared_bytes(self, first: tuple[int, int], second: tuple[int, int]) -> float:
        """Return the bytes that two layer intervals [from, to) share, vocabulary matrices included."""
        low, high = max(first[0], second[0]), min(first[1], second[1])
        if low >= high:
            return 0.0
        ends = self.embedding_bytes * (low == 0) + self.head_bytes * (high == self.num_layers)
        return (high - low) * self.layer_bytes + ends


def transfer_s(
    line: WeightLine,
    view: ClusterView,
    links: LinkTimes,
    model: CostModel,
    training: Sequence[StageSlots],
    generation: Sequence[StageSlots],
) -> float:
    """Return C_reshard or C_sync of a placement of actor training and generation."""
    machines = view.machine_of.tolist()
    if _is_nested(training, generation):
        seconds = _reshard_s(line, machines, links, training, generation)
        if seconds is not None:
            return model.sync_factor * seconds
        return model.sync_factor * _direct_s(line, machines, links, training, generation, 1.0)
    gpus_t = {gpu for replica in training for _, gpus in replica for gpu in gpus}
    gpus_g = {gpu for replica in generation for _, gpus in replica for gpu in gpus}
    if model.fanout is Fanout.DIRECT or gpus_t & gpus_g:
        return model.sync_factor * _direct_s(line, machines, links, training, generation, model.delta_fraction)
    num_bytes = line.total_bytes * model.delta_fraction
    from_machines = sorted({machines[gpu] for gpu in gpus_t})
    to_machines = sorted({machines[gpu] for gpu in gpus_g})
    if model.fanout is Fanout.SEQUENTIAL:
        return model.sync_factor * sequential_s(links, from_machines, to_machines, num_bytes)
    regions = view.region_of_machine.tolist()
    return model.sync_factor * per_region_s(links, regions, from_machines, to_machines, num_bytes)


def sequential_s(links: LinkTimes, senders: Sequence[int], receivers: Sequence[int], num_bytes: float) -> float:
    """Return the time of one full copy to each receiving machine in turn, each over its best link."""
    return sum(min(links.edge_s(sender, receiver, num_bytes) for sender in senders) for receiver in receivers)


def per_region_s(
    links: LinkTimes, regions: Sequence[int], senders: Sequence[int], receivers: Sequence[int], num_bytes: float
) -> float:
    """Return the time of one copy into each region, then copies inside it at the same time; max over regions.

    A region that trains needs no copy into it. The machine that the copy enters is the one that makes the sum least.
    """
    slowest = 0.0
    for region in sorted({regions[m] for m in receivers}):
        inside = [m for m in receivers if regions[m] == region]
        local = [m for m in senders if regions[m] == region]
        if local:
            seconds = max(min(links.edge_s(s, m, num_bytes) for s in local) for m in inside)
        else:
            seconds = min(_through(links, senders, entry, inside, num_bytes) for entry in inside)
        slowest = max(slowest, seconds)
    return slowest


def _through(links: LinkTimes, senders: Sequence[int], entry: int, inside: Sequence[int], num_bytes: float) -> float:
    into = min(links.edge_s(sender, entry, num_bytes) for sender in senders)
    onward = max((links.edge_s(entry, m, num_bytes) for m in inside if m != entry), default=0.0)
    return into + onward


def _is_nested(training: Sequence[StageSlots], generation: Sequence[StageSlots]) -> bool:
    """Tell whether both tasks use the same GPUs and every generation replica lies inside one training replica."""
    home = {gpu: i for i, replica in enumerate(training) for _, gpus in replica for gpu in gpus}
    used = 0
    for replica in generation:
        gpus = [gpu for _, stage in replica for gpu in stage]
        used += len(gpus)
        if len({home.get(gpu, -1) for gpu in gpus}) != 1 or gpus[0] not in home:
            return False
    return used == len(home)


def _reshard_s(
    line: WeightLine,
    machines: Sequence[int],
    links: LinkTimes,
    training: Sequence[StageSlots],
    generation: Sequence[StageSlots],
) -> float | None:
    """Return C_reshard on shared GPUs, or None where the degrees are not uniform or only the order differs.

    Volume per GPU: M (tp - t_g p_g) / (t_g p_g t p) inside micro-DP groups when t_g | t and p_g | p, otherwise
    M (tp - 1) / (tp) over the whole training replica (HybridFlow, Table 2).
    """
    p, t = len(training[0]), len(training[0][0][1])
    p_g, t_g = len(generation[0]), len(generation[0][0][1])
    shapes_t = {tuple(len(gpus) for _, gpus in replica) for replica in training}
    shapes_g = {tuple(len(gpus) for _, gpus in replica) for replica in generation}
    if shapes_t != {(t,) * p} or shapes_g != {(t_g,) * p_g}:
        return None
    if (p, t) == (p_g, t_g):
        return 0.0 if _slots(training) == _slots(generation) else None
    if t % t_g or p % p_g:
        volume, height, width = line.total_bytes * (t * p - 1) / (t * p), p, t
    else:
        volume = line.total_bytes * (t * p - t_g * p_g) / (t_g * p_g * t * p)
        height, width = p // p_g, t // t_g
    slowest = 0.0
    for replica in training:
        for j in range(0, p, height):
            for k in range(0, t, width):
                block = [machines[g] for _, gpus in replica[j : j + height] for g in gpus[k : k + width]]
                slowest = max(slowest, links.ring_s(tuple(sorted(block)), volume))
    return slowest


def _slots(replicas: Sequence[StageSlots]) -> list[list[tuple[int, tuple[int, ...]]]]:
    return [[(layers, tuple(gpus)) for layers, gpus in replica] for replica in replicas]


@dataclass(frozen=True, slots=True)
class _Shard:
    """A tasklet's part of the line: a layer interval and a fraction interval of each matrix."""

    gpu: int
    layers: tuple[int, int]
    low: float
    high: float


def _shards(replica: StageSlots) -> list[_Shard]:
    shards, position = [], 0
    for layers, gpus in replica:
        interval, width = (position, position + layers), len(gpus)
        shards += [_Shard(gpu, interval, k / width, (k + 1) / width) for k, gpu in enumerate(gpus)]
        position += layers
    return shards


def _direct_s(
    line: WeightLine,
    machines: Sequence[int],
    links: LinkTimes,
    training: Sequence[StageSlots],
    generation: Sequence[StageSlots],
    fraction: float,
) -> float:
    """Return max(slowest receiver, busiest sender) when every tasklet pulls its shard from its cheapest replica."""
    sources = [_shards(replica) for replica in training]
    training_gpus = {shard.gpu for replica in sources for shard in replica}
    # Replicas on the same machines are alike as senders to a GPU that holds no weights: the first one serves it.
    firsts: dict[tuple[tuple[tuple[int, int], float, int], ...], list[_Shard]] = {}
    for shards in sources:
        firsts.setdefault(_signature(shards, machines), shards)
    pieces: dict[tuple[object, ...], list[list[tuple[int, float]]]] = {}
    best: dict[tuple[object, ...], tuple[float, list[tuple[int, float]]]] = {}
    sent: dict[int, float] = {}
    slowest = 0.0
    for replica in generation:
        for shard in _shards(replica):
            holds = shard.gpu in training_gpus
            part = (shard.layers, shard.low, shard.high, holds)
            key = (part, shard.gpu if holds else machines[shard.gpu])
            if key not in best:
                if part not in pieces:
                    senders = sources if holds else firsts.values()
                    pieces[part] = [_needed(line, shard, sender, fraction) for sender in senders]
                best[key] = _cheapest([_pull(links, machines, shard.gpu, p) for p in pieces[part]])
            seconds, per_sender = best[key]
            slowest = max(slowest, seconds)
            for sender, busy in per_sender:
                sent[sender] = sent.get(sender, 0.0) + busy
    return max(slowest, max(sent.values(), default=0.0))


def _cheapest(pulls: Sequence[tuple[float, list[tuple[int, float]]]]) -> tuple[float, list[tuple[int, float]]]:
    """Return the first of the pulls that are not clearly slower than the fastest (equal sums differ by rounding)."""
    least = min(seconds for seconds, _ in pulls)
    return next(pull for pull in pulls if pull[0] * CLEARLY_LESS <= least)


def _signature(replica: Sequence[_Shard], machines: Sequence[int]) -> tuple[tuple[tuple[int, int], float, int], ...]:
    return tuple((shard.layers, shard.low, machines[shard.gpu]) for shard in replica)


def _needed(line: WeightLine, target: _Shard, sources: Sequence[_Shard], fraction: float) -> list[tuple[int, float]]:
    """Return (GPU, bytes) that a shard takes from each tasklet of one training replica."""
    needed = []
    for source in sources:
        overlap = min(target.high, source.high) - max(target.low, source.low)
        num_bytes = line.shared_bytes(target.layers, source.layers) * overlap * fraction if overlap > 0 else 0.0
        if num_bytes > 0:
            needed.append((source.gpu, num_bytes))
    return needed


def _pull(
    links: LinkTimes, machines: Sequence[int], gpu: int, pieces: Sequence[tuple[int, float]]
) -> tuple[float, list[tuple[int, float]]]:
    """Return (seconds in sum, seconds per sender); what the GPU already holds costs nothing."""
    here = machines[gpu]
    busy = [(source, links.edge_s(machines[source], here, n)) for source, n in pieces if source != gpu]
    return sum(seconds for _, seconds in busy), busy
