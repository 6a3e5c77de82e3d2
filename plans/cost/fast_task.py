"""Fast cost of one task on a compact placement: the numbers of `plans.cost.task_cost`, with stages kept.

A stage (a tuple of GPUs) recurs in many placements, so its slowest chip and its ring are worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plans.cost.collectives import LinkTimes
from plans.cost.compact import CompactTask
from plans.cost.terms import DecodeTerms, TaskTerms
from plans.spec.cluster import ClusterView

#: Stages kept per micro-batch size after which they are forgotten: bounds memory in long searches.
STAGE_LIMIT = 20_000


class FastTaskCost(NamedTuple):
    """Seconds of one task; see `plans.cost.task_cost.TaskCost`."""

    total_s: float
    comp_s: float
    hbm_s: float
    tp_s: float
    pp_s: float
    dp_s: float
    bubble_s: float


class _Stage(NamedTuple):
    """What the formulas need of the GPUs of a stage."""

    flop_per_s: float
    hbm_bytes_per_s: float
    overhead_s: float
    machines: tuple[int, ...]
    places: frozenset[int]
    only_machine: int
    """The machine of all its GPUs, or -1."""
    ring_s: float
    """One all-reduce of a micro-batch over the best ring."""


class FastTaskPricer:
    """Prices placements of one task."""

    def __init__(self, view: ClusterView, links: LinkTimes, terms: TaskTerms) -> None:
        self.links = links
        self.terms = terms
        # Lists: reading single elements of them is several times faster than of arrays.
        self._machine_of: list[int] = view.machine_of.tolist()
        self._flop_per_s: list[float] = terms.compute_flop_per_s.tolist()
        self._hbm_bytes_per_s: list[float] = terms.hbm_bytes_per_s.tolist()
        self._overhead_s: list[float] = [] if terms.decode is None else terms.decode.layer_overhead_s.tolist()
        self._tables: dict[int, dict[tuple[int, ...], _Stage]] = {}

    def replica_s(self, placement: CompactTask, index: int, samples: int, decode_batch: int) -> float:
        """Return the seconds of one replica with so many samples, without the gradient all-reduce."""
        table = self._stage_table(placement.micro_batch_size)
        return self._replica(table, placement, index, samples, decode_batch)[0]

    def stage_totals(self, placement: CompactTask, index: int, decode_batch: int) -> tuple[float, ...]:
        """Return the seconds of each stage of one replica."""
        table = self._stage_table(placement.micro_batch_size)
        return tuple(self._replica(table, placement, index, placement.samples[index], decode_batch)[6])

    def cost(self, placement: CompactTask, decode_batches: tuple[int, ...]) -> FastTaskCost:
        """Return the cost of the task; generation needs one decode batch per replica."""
        terms = self.terms
        table = self._stage_table(placement.micro_batch_size)
        total = comp = hbm = tp = pp = bubble = 0.0
        for i, samples in enumerate(placement.samples):
            batch = decode_batches[i] if decode_batches else 1
            slowest, c, h, t, p, b, _ = self._replica(table, placement, i, samples, batch)
            total = slowest if slowest > total else total
            comp = c if c > comp else comp
            hbm = h if h > hbm else hbm
            tp = t if t > tp else tp
            pp = p if p > pp else pp
            bubble = b if b > bubble else bubble
        dp = self._gradient_s(table, placement) if terms.is_training else 0.0
        return FastTaskCost(total + dp, comp, hbm, tp, pp, dp, bubble)

    def _replica(
        self,
        table: dict[tuple[int, ...], _Stage],
        placement: CompactTask,
        index: int,
        num_samples: int,
        batch: int,
    ) -> tuple[float, float, float, float, float, float, list[float]]:
        """Return (slowest stage + bubble, the largest comp, hbm, tp, pp, the bubble, stage totals) of a replica."""
        terms = self.terms
        mbs, layers = placement.micro_batch_size, placement.layers
        gpus = placement.stages[index]
        last = len(gpus) - 1
        tp_degree = len(gpus[0])
        micro_batches = -(-num_samples // mbs)
        samples = micro_batches * mbs if terms.pads_micro_batches else num_samples
        work = terms.passes * samples
        tp_factor = terms.tp_count * micro_batches
        pp_factor = terms.pp_count * micro_batches
        pp_bytes = terms.activation_bytes * mbs
        totals: list[float] = []
        comp_max = hbm_max = tp_max = pp_max = flow = 0.0
        decode = terms.decode
        steps = decode.steps(float(samples), batch) if decode is not None else 0.0
        groups = decode.groups(len(gpus)) if decode is not None else 1
        stage = table.get(gpus[0]) or self._make_stage(table, gpus[0], mbs)
        for j, num_layers in enumerate(layers):
            is_last = j == last
            flop = num_layers * terms.layer_flop + (terms.head_flop if is_last else 0.0)
            comp = work * flop / (stage.flop_per_s * tp_degree)
            tp = tp_factor * num_layers * stage.ring_s
            pp = hbm = 0.0
            following = stage
            if not is_last:
                following = table.get(gpus[j + 1]) or self._make_stage(table, gpus[j + 1], mbs)
                pp = pp_factor * self._pair_s(stage, following, pp_bytes)
            if j:
                flow += comp + tp + pp
            if decode is not None:
                hbm = steps * _decode_step_s(decode, stage, num_layers, batch, tp_degree, groups, is_last=is_last)
                if decode.tp_count:
                    passes, share = steps * groups, batch / groups
                    tp += passes * decode.tp_count * num_layers * self._token_ring_s(decode, stage, share, tp_degree)
                    if not is_last:
                        pp += passes * self._pair_s(stage, following, share * decode.token_bytes)
            total = comp + tp + pp + hbm
            totals.append(total)
            comp_max = comp if comp > comp_max else comp_max
            hbm_max = hbm if hbm > hbm_max else hbm_max
            tp_max = tp if tp > tp_max else tp_max
            pp_max = pp if pp > pp_max else pp_max
            stage = following
        bubble = terms.updates * flow / micro_batches if terms.has_bubble else 0.0
        return max(totals) + bubble, comp_max, hbm_max, tp_max, pp_max, bubble, totals

    def _pair_s(self, first: _Stage, second: _Stage, num_bytes: float) -> float:
        if first.only_machine >= 0 and second.only_machine >= 0:
            return self.links.edge_s(first.only_machine, second.only_machine, num_bytes)
        return self.links.pair_s(first.places, second.places, num_bytes)

    def _token_ring_s(self, decode: DecodeTerms, stage: _Stage, batch: float, tp: int) -> float:
        if tp == 1:
            return 0.0
        return self.links.ring_s(stage.machines, batch * decode.token_bytes * (2.0 * (tp - 1) / tp))

    def _stage_table(self, micro_batch_size: int) -> dict[tuple[int, ...], _Stage]:
        table = self._tables.setdefault(micro_batch_size, {})
        if len(table) > STAGE_LIMIT:
            table.clear()
        return table

    def _make_stage(self, table: dict[tuple[int, ...], _Stage], gpus: tuple[int, ...], mbs: int) -> _Stage:
        machines = tuple(sorted(self._machine_of[gpu] for gpu in gpus))
        tp = len(gpus)
        stage = _Stage(
            flop_per_s=min([self._flop_per_s[gpu] for gpu in gpus]),
            hbm_bytes_per_s=min([self._hbm_bytes_per_s[gpu] for gpu in gpus]),
            overhead_s=max([self._overhead_s[gpu] for gpu in gpus]) if self._overhead_s else 0.0,
            machines=machines,
            places=frozenset(machines),
            only_machine=machines[0] if machines[0] == machines[-1] else -1,
            ring_s=0.0 if tp == 1 else self.links.ring_s(machines, self.terms.tp_bytes(mbs, tp)),
        )
        table[gpus] = stage
        return stage

    def _gradient_s(self, table: dict[tuple[int, ...], _Stage], placement: CompactTask) -> float:
        if placement.dp == 1:
            return 0.0
        terms = self.terms
        slowest, last = 0.0, placement.pp - 1
        for j, num_layers in enumerate(placement.layers):
            weights = terms.stage_gradient_bytes(num_layers, is_first=j == 0, is_last=j == last)
            num_bytes = terms.dp_bytes(weights, placement.dp, placement.tp)
            column = [replica[j] for replica in placement.stages]
            for ring in self._rings_of(table, column):
                slowest = max(slowest, self.links.ring_s(ring, num_bytes))
        return terms.updates * slowest

    def _rings_of(
        self, table: dict[tuple[int, ...], _Stage], column: Sequence[tuple[int, ...]]
    ) -> set[tuple[int, ...]]:
        """Return the distinct machine multisets of a stage's gradient rings, one ring per TP rank."""
        only = [table[gpus].only_machine for gpus in column]
        if min(only) >= 0:
            only.sort()
            return {tuple(only)}
        return {tuple(sorted([self._machine_of[gpu] for gpu in rank])) for rank in zip(*column, strict=True)}


def _decode_step_s(
    decode: DecodeTerms, stage: _Stage, num_layers: int, batch: int, tp: int, groups: int, *, is_last: bool
) -> float:
    weights = groups * (num_layers * decode.layer_bytes + (decode.head_bytes if is_last else 0.0)) / tp
    cache = batch * num_layers * decode.cache_bytes / min(tp, decode.kv_heads)
    memory_s = (weights + cache) / stage.hbm_bytes_per_s
    work = batch * (num_layers * decode.layer_flop + (decode.head_flop if is_last else 0.0)) / tp
    compute_s = work / stage.flop_per_s
    return (memory_s if memory_s > compute_s else compute_s) + groups * num_layers * stage.overhead_s
