"""Load balancing inside plan evaluation: layers per stage and samples per replica of a layout (HetRL section 4.4).

The strategies are those of `plans.balance`; here they are applied with the linear unit costs of the cost model by
machine code (`plans.cost.compiled.balance`), because a search does it for every layout it prices. Lengths are equal
for the analytic model, so strategy (b) amounts to sample counts in proportion to speed. Unit costs only steer the
shares: the price is the evaluator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plans.cost.compact import CompactTask, GpuGrid
from plans.cost.compiled.tables import SPLIT_EVEN, SPLIT_MEMORY, SPLIT_SPEED
from plans.cost.evaluator import PlanEvaluator
from plans.search.layouts import LayerSplit
from plans.workflow import RlTask

#: Numbers of the layer splits in the row of a task.
SPLIT_NUMBERS = {
    LayerSplit.SPEED: SPLIT_SPEED,
    LayerSplit.MEMORY: SPLIT_MEMORY,
    LayerSplit.EVEN: SPLIT_EVEN,
}


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
    """Layer splits of the layouts of one task."""

    def __init__(self, evaluator: PlanEvaluator, task: RlTask, micro_batch_size: int) -> None:
        """Keep the arguments."""
        self._evaluator, self._task, self._mbs = evaluator, task, micro_batch_size

    def layers(self, grid: GpuGrid, split: LayerSplit) -> tuple[int, ...] | None:
        """Return layers per stage [pp] of a placement [dp, pp, tp]; None where no split fits memory or layers."""
        placement = CompactTask(grid, (0,) * grid.shape[1], (0,) * grid.shape[0], self._mbs)
        return self._evaluator.split_layers(self._task, placement, SPLIT_NUMBERS[split])

    def resident_share(self, grid: GpuGrid, layers: Sequence[int]) -> float:
        """Return the largest share of a GPU's memory that its shard of the model fills."""
        placement = CompactTask(grid, tuple(layers), (0,) * grid.shape[0], self._mbs)
        return self._evaluator.resident_share(self._task, placement)


def share_samples(total: int, unit_s: Sequence[float]) -> tuple[int, ...]:
    """Return samples per replica that minimise the largest `samples * unit_s`, each at least 1; `total` >= replicas."""
    # Machine code is loaded when somebody searches, not when the package is imported.
    from plans.cost.compiled.doors import share_samples as compiled_share_samples

    samples = np.empty(len(unit_s), dtype=np.int64)
    compiled_share_samples(total, np.array(unit_s, dtype=np.float64), samples)
    return tuple(samples.tolist())
