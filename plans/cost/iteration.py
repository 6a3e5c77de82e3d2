"""Task costs -> seconds per RL iteration: Phi per phase, then the sync sum or the async maximum (HetRL section 4)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from plans.spec.job import Mode
from plans.workflow import RlTask, TaskKind


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of the phases of an iteration."""

    generation_s: float
    inference_s: float
    training_s: float
    transfer_s: float
    iteration_s: float


def phi(costs: Sequence[tuple[Hashable, float]], eta: float | None) -> float:
    """Return Phi of a phase's tasks, given as (group, seconds).

    Phi = max + (1 - eta) (sum - max). With eta = None the exact value of the grouping: tasks of a group follow each
    other, groups run side by side, max over groups of the sum inside (hetrl.md 4.3).
    """
    if not costs:
        return 0.0
    if eta is not None:
        longest = max(seconds for _, seconds in costs)
        return longest + (1.0 - eta) * (sum(seconds for _, seconds in costs) - longest)
    per_group: dict[Hashable, float] = {}
    for group, seconds in costs:
        per_group[group] = per_group.get(group, 0.0) + seconds
    return max(per_group.values())


def combine(
    mode: Mode, costs: Mapping[RlTask, float], group_of: Mapping[RlTask, int], transfer_s: float, eta: float | None
) -> PhaseTimes:
    """Return the phases and the iteration.

    Sync: gen + Phi(inference) + Phi(training) + reshard. Async: max(gen, Phi(inference) + Phi(training)) + sync.
    """
    generation = costs[RlTask.ACTOR_GENERATION]
    inference = phi([(group_of[t], s) for t, s in costs.items() if t.kind is TaskKind.INFERENCE], eta)
    training = phi([(group_of[t], s) for t, s in costs.items() if t.kind is TaskKind.TRAINING], eta)
    if mode is Mode.SYNC:
        iteration = generation + inference + training + transfer_s
    else:
        iteration = max(generation, inference + training) + transfer_s
    return PhaseTimes(generation, inference, training, transfer_s, iteration)
