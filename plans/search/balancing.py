"""Load balancing inside plan evaluation: layers per stage and samples per replica of a layout (HetRL section 4.4).

The strategies and their rules are those of `plans.balance`; here they are applied with the linear unit costs of the
cost model, because a search does it for every layout it prices. Lengths are equal for the analytic model, so strategy
(b) amounts to sample counts in proportion to speed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plans.balance import balance_layers, proportional_shares
from plans.cost.evaluator import PlanEvaluator
from plans.errors import InfeasibleError
from plans.memory import TaskMemory
from plans.search.layouts import LayerSplit, TaskLayout
from plans.workflow import RlTask

FloatArray = NDArray[np.float64]


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


class LayerBalancer:
    """Layers per stage for the layouts of one task."""

    def __init__(self, evaluator: PlanEvaluator, task: RlTask) -> None:
        """Read the task's constants."""
        self._terms = evaluator.terms[task]
        self._links = evaluator.links
        self._memory = TaskMemory(evaluator.job, task)
        view = evaluator.view
        self._machine_of = view.machine_of
        self._capacity = view.memory_bytes - view.reserve_bytes
        self._mbs = evaluator.job.training.micro_batch_size

    def layers(self, grid: NDArray[np.int32], split: LayerSplit) -> tuple[int, ...] | None:
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
        costs = self.layer_costs(grid)
        relative = (costs / costs.mean(axis=1, keepdims=True)).max(axis=0)
        try:
            return balance_layers(total, relative.tolist(), caps=self._caps(grid))
        except InfeasibleError:
            return None

    def layer_costs(self, grid: NDArray[np.int32]) -> FloatArray:
        """Return seconds per layer and sample of each stage [dp, pp]: compute, TP rings, decoding."""
        terms = self._terms
        tp = grid.shape[2]
        costs: FloatArray = terms.passes * terms.layer_flop / (terms.compute_flop_per_s[grid].min(axis=2) * tp)
        if tp > 1:
            costs = costs + terms.tp_count / self._mbs * self._rings(grid, terms.tp_bytes(self._mbs, tp))
        if terms.decode is not None:
            # One sequence of a decode batch of typical size; only the relation between stages matters.
            read = terms.decode.lengths.response * terms.decode.layer_bytes / 64.0
            costs = costs + read / (terms.hbm_bytes_per_s[grid].min(axis=2) * tp)
        return costs

    def _rings(self, grid: NDArray[np.int32], num_bytes: float) -> FloatArray:
        machines = np.sort(self._machine_of[grid], axis=2)
        flat = machines.reshape(-1, grid.shape[2])
        rings = [self._links.ring_s(tuple(row), num_bytes) for row in flat.tolist()]
        return np.array(rings).reshape(grid.shape[:2])

    def _caps(self, grid: NDArray[np.int32]) -> list[int]:
        """Return the most layers of each stage that its GPUs could hold if they held nothing else."""
        memory, stages, tp = self._memory, grid.shape[1], grid.shape[2]
        room = self._capacity[grid].min(axis=(0, 2))
        caps = []
        for j in range(stages):
            one, two = (
                memory.model_bytes(n, is_first=j == 0, is_last=j == stages - 1, tp=tp, dp=grid.shape[0]) for n in (1, 2)
            )
            caps.append(1 + math.floor(max(0.0, float(room[j]) - one) / (two - one)))
        return caps


def share_samples(total: int, unit_s: Sequence[float]) -> tuple[int, ...]:
    """Return samples per replica that minimise the largest `samples * unit_s`, each at least 1.

    Floors of the proportional shares, then one sample at a time to the replica that would finish first: exact for linear
    costs. O(r log r) for r replicas; `total` >= r.
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
