"""Load balancing inside plan evaluation: layers per stage and samples per replica of a layout (HetRL section 4.4).

The strategies are those of `plans.balance`; here they are applied with the linear unit costs of the cost model in array
form, because a search does it for every layout it prices. Lengths are equal for the analytic model, so strategy (b)
amounts to sample counts in proportion to speed. Unit costs only steer the shares: the price is the evaluator's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plans.balance import balance_layers, proportional_shares
from plans.cost.compact import GpuGrid
from plans.cost.evaluator import PlanEvaluator
from plans.errors import InfeasibleError
from plans.memory import TaskMemory
from plans.search.layouts import LayerSplit
from plans.workflow import RlTask

FloatArray = NDArray[np.float64]


#: Sequences decoded together that layer splits of generation assume.
TYPICAL_BATCH = 64.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancing:
    """Which strategies are used (for ablations)."""

    generation_samples: bool = True
    """Strategy (a): samples over the replicas of generation."""
    other_samples: bool = True
    """Strategy (b): samples over the replicas of the other tasks."""
    layers: bool = True
    """Strategy (c): layers over pipeline stages."""

    @classmethod
    def none(cls) -> Balancing:
        """Return even shares everywhere."""
        return cls(generation_samples=False, other_samples=False, layers=False)


class TaskRates:
    """Unit costs and layer splits for the layouts of one task."""

    def __init__(self, evaluator: PlanEvaluator, task: RlTask, micro_batch_size: int) -> None:
        """Read the task's constants."""
        self._terms = evaluator.terms[task]
        self._links = evaluator.links
        self._memory = TaskMemory(evaluator.job, task)
        view = evaluator.view
        self._machine_of = view.machine_of
        self._capacity = view.memory_bytes - view.reserve_bytes
        self._mbs = micro_batch_size
        self._bytes: dict[tuple[int, int], tuple[float, float, float]] = {}

    def layers(self, grid: GpuGrid, split: LayerSplit) -> tuple[int, ...] | None:
        """Return layers per stage [pp] of a placement [dp, pp, tp]; None where no split fits memory or layers."""
        stages = grid.shape[1]
        total = self._terms.num_layers
        if stages == 1:
            return (total,)
        if stages > total:
            return None
        if split is LayerSplit.EVEN:
            return proportional_shares(total, [1.0] * stages)
        if split is LayerSplit.MEMORY:
            return proportional_shares(total, self._capacity[grid].min(axis=(0, 2)).tolist())
        costs = self._layer_costs(grid)
        if not np.isfinite(costs).all():  # a TP group over a forbidden link: no split helps
            return proportional_shares(total, [1.0] * stages)
        mean = costs.mean(axis=1, keepdims=True)
        relative = (costs / mean).max(axis=0)
        fixed = np.zeros(stages)
        fixed[-1] = (self._head_s(grid) / mean[:, 0]).max()
        try:
            return balance_layers(total, relative.tolist(), fixed_s=fixed.tolist(), caps=self._caps(grid))
        except InfeasibleError:
            return None

    def resident_share(self, grid: GpuGrid, layers: Sequence[int]) -> float:
        """Return the largest share of a GPU's memory that its shard of the model fills."""
        per_layer, first, last = self._resident(grid.shape[2], grid.shape[0])
        held = np.array(layers) * per_layer
        held[0] += first
        held[-1] += last
        return float((held / self._capacity[grid].min(axis=(0, 2))).max())

    def replica_unit_s(self, grid: GpuGrid, layers: Sequence[int], rooms: Sequence[int]) -> FloatArray | None:
        """Return seconds per sample of each replica [dp]; None where a TP group spans machines.

        Args:
            grid: placement [dp, pp, tp].
            layers: layers per stage [pp].
            rooms: decode batch per replica [dp]; empty for tasks that don't decode.
        """
        terms, tp = self._terms, grid.shape[2]
        machines = self._machine_of[grid]
        here: NDArray[np.int64] = machines[:, :, 0]
        if tp > 1 and not (machines == here[:, :, None]).all():
            return None
        count = np.array(layers, dtype=np.float64)
        flop_per_s = terms.compute_flop_per_s[grid].min(axis=2) * tp
        work = count * terms.layer_flop
        work[-1] += terms.head_flop
        seconds: FloatArray = terms.passes * work / flop_per_s
        if tp > 1:
            seconds = seconds + terms.tp_count / self._mbs * count * self._ring_s(
                here, terms.tp_bytes(self._mbs, tp), tp
            )
        if len(layers) > 1:
            pair = self._pair_s(here, terms.pp_bytes(self._mbs))
            seconds[:, :-1] += terms.pp_count / self._mbs * pair
        if terms.decode is not None:
            seconds = seconds + self._decode_unit_s(grid, count, here, np.array(rooms, dtype=np.float64)[:, None])
        unit: FloatArray = seconds.max(axis=1)
        return unit

    def _decode_unit_s(
        self, grid: GpuGrid, count: FloatArray, here: NDArray[np.int64], batch: FloatArray
    ) -> FloatArray:
        """Return decode seconds per sample of each stage [dp, pp]; `batch` is [dp, 1]."""
        terms, tp = self._terms, grid.shape[2]
        decode = terms.decode
        if decode is None:
            return np.zeros(grid.shape[:2])
        weights = count * decode.layer_bytes
        weights[-1] += decode.head_bytes
        cache = batch * count * decode.cache_bytes / min(tp, decode.kv_heads)
        memory_s = (weights / tp + cache) / terms.hbm_bytes_per_s[grid].min(axis=2)
        flop = count * decode.layer_flop
        flop[-1] += decode.head_flop
        compute_s = batch * flop / tp / terms.compute_flop_per_s[grid].min(axis=2)
        step: FloatArray = np.maximum(memory_s, compute_s) + count * decode.layer_overhead_s[grid].max(axis=2)
        if decode.tp_count and tp > 1:
            step += decode.tp_count * count * self._ring_s(here, 2.0 * (tp - 1) / tp * batch * decode.token_bytes, tp)
        if decode.token_bytes and len(count) > 1:
            step[:, :-1] += self._pair_s(here, batch * decode.token_bytes)
        return decode.lengths.response / batch * step

    def _layer_costs(self, grid: GpuGrid) -> FloatArray:
        """Return seconds per layer and sample of each stage [dp, pp]: compute, TP rings, decoding."""
        terms, tp = self._terms, grid.shape[2]
        costs: FloatArray = terms.passes * terms.layer_flop / (terms.compute_flop_per_s[grid].min(axis=2) * tp)
        if tp > 1:
            costs = costs + terms.tp_count / self._mbs * self._any_ring_s(grid, terms.tp_bytes(self._mbs, tp))
        if terms.decode is not None:
            # One sequence of a decode batch of typical size; only the relation between stages matters.
            read = terms.decode.lengths.response * terms.decode.layer_bytes / TYPICAL_BATCH
            costs = costs + read / (terms.hbm_bytes_per_s[grid].min(axis=2) * tp)
        return costs

    def _head_s(self, grid: GpuGrid) -> FloatArray:
        """Return seconds per sample of the vocabulary head on the last stage [dp]; 0 in paper mode."""
        terms, last, tp = self._terms, grid[:, -1], grid.shape[2]
        seconds: FloatArray = terms.passes * terms.head_flop / (terms.compute_flop_per_s[last].min(axis=1) * tp)
        if terms.decode is not None:
            read = terms.decode.lengths.response * terms.decode.head_bytes / TYPICAL_BATCH
            seconds = seconds + read / (terms.hbm_bytes_per_s[last].min(axis=1) * tp)
        return seconds

    def _any_ring_s(self, grid: GpuGrid, num_bytes: float) -> FloatArray:
        machines = self._machine_of[grid]
        if (machines == machines[:, :, :1]).all():
            return self._ring_s(machines[:, :, 0], num_bytes, grid.shape[2])
        flat = np.sort(machines, axis=2).reshape(-1, grid.shape[2])
        return np.array([self._links.ring_s(tuple(row), num_bytes) for row in flat.tolist()]).reshape(grid.shape[:2])

    def _ring_s(self, machine: NDArray[np.int64], num_bytes: float | FloatArray, tp: int) -> FloatArray:
        """Return the ring inside a machine of each stage [dp, pp]."""
        steps = 2 * (tp - 1) if self._links.latency_per_step else 1
        ring: FloatArray = steps * self._links.latency_s[machine, machine]
        return ring + num_bytes * self._links.s_per_byte[machine, machine]

    def _pair_s(self, machine: NDArray[np.int64], num_bytes: float | FloatArray) -> FloatArray:
        """Return the transfer from each stage to the next [dp, pp - 1]."""
        a, b = machine[:, :-1], machine[:, 1:]
        pair: FloatArray = self._links.latency_s[a, b] + num_bytes * self._links.s_per_byte[a, b]
        return pair

    def _caps(self, grid: GpuGrid) -> list[int]:
        """Return the most layers of each stage that its GPUs could hold if they held nothing else."""
        per_layer, first, last = self._resident(grid.shape[2], grid.shape[0])
        room = self._capacity[grid].min(axis=(0, 2))
        room[0] -= first
        room[-1] -= last
        return [max(1, math.floor(value)) for value in (room / per_layer).tolist()]

    def _resident(self, tp: int, dp: int) -> tuple[float, float, float]:
        """Return resident bytes per layer, and the extra of the first and the last stage."""
        found = self._bytes.get((tp, dp))
        if found is None:
            memory = self._memory
            one = memory.model_bytes(1, is_first=False, is_last=False, tp=tp, dp=dp)
            first = memory.model_bytes(1, is_first=True, is_last=False, tp=tp, dp=dp) - one
            last = memory.model_bytes(1, is_first=False, is_last=True, tp=tp, dp=dp) - one
            found = self._bytes[tp, dp] = (one, first, last)
        return found


def share_samples(total: int, unit_s: Sequence[float]) -> tuple[int, ...]:
    """Return samples per replica that minimise the largest `samples * unit_s`, each at least 1.

    Floors of the proportional shares, then one sample at a time to the replica that would finish first: exact for
    linear costs. O(r log r) for r replicas; `total` >= r.
    """
    rate = math.fsum(1.0 / seconds for seconds in unit_s)
    shares = [max(1, math.floor(total / (seconds * rate) + 1e-9)) for seconds in unit_s]
    left = total - sum(shares)
    if left > 0:
        heap = [((share + 1) * seconds, i) for i, (share, seconds) in enumerate(zip(shares, unit_s, strict=True))]
        heapq.heapify(heap)
        for _ in range(left):
            _, i = heap[0]
            shares[i] += 1
            heapq.heapreplace(heap, ((shares[i] + 1) * unit_s[i], i))
    while left < 0:
        # Lifting slow replicas to one sample took too many: the slowest of the others give them back.
        i = max((i for i in range(len(shares)) if shares[i] > 1), key=lambda i: shares[i] * unit_s[i])
        shares[i] -= 1
        left += 1
    return tuple(shares)
