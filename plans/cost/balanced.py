"""Load balancing of compact placements with the cost model's own times (HetRL: inside plan evaluation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plans.balance import balance_layers, balance_samples
from plans.cost.compact import CompactTask
from plans.cost.evaluator import PlanEvaluator
from plans.workflow import RlTask


def with_balanced_samples(
    evaluator: PlanEvaluator, task: RlTask, placement: CompactTask, decode_rooms: Sequence[int] = ()
) -> CompactTask:
    """Return the placement with samples per replica that make its slowest replica fastest (strategies a and b).

    Args:
        evaluator: prices replicas.
        task: the task.
        placement: the placement; its samples only say how many there are in all.
        decode_rooms: for generation, sequences that fit per replica (`Evaluation.decode_rooms`).
    """
    total, replicas = sum(placement.samples), placement.dp
    if replicas == 1:
        return placement

    def finish_s(index: int, samples: int) -> float:
        batch = max(1, min(decode_rooms[index], samples)) if decode_rooms else 1
        return evaluator.replica_s(task, placement, index, samples, batch)

    return replace_samples(placement, balance_samples(total, replicas, finish_s, unit=placement.micro_batch_size))


def with_balanced_layers(
    evaluator: PlanEvaluator,
    task: RlTask,
    placement: CompactTask,
    decode_batches: Sequence[int] = (),
    caps: Sequence[int] | None = None,
) -> CompactTask:
    """Return the placement with layers per stage that make its slowest stage fastest (strategy c).

    A stage's time is linear in its layers; slope and offset of a stage are the largest over the replicas, which all
    share one split. `caps` bounds the layers per stage (memory).
    """
    if placement.pp == 1:
        return placement
    slopes, offsets = [0.0] * placement.pp, [0.0] * placement.pp
    one, two = replace_layers(placement, [1] * placement.pp), replace_layers(placement, [2] * placement.pp)
    for i in range(placement.dp):
        batch = decode_batches[i] if decode_batches else 1
        first = evaluator.stage_totals(task, one, i, batch)
        second = evaluator.stage_totals(task, two, i, batch)
        for j in range(placement.pp):
            slope = second[j] - first[j]
            slopes[j] = max(slopes[j], slope)
            offsets[j] = max(offsets[j], first[j] - slope)
    return replace_layers(placement, balance_layers(sum(placement.layers), slopes, fixed_s=offsets, caps=caps))


def replace_samples(placement: CompactTask, samples: Sequence[int]) -> CompactTask:
    """Return the placement with other samples per replica."""
    return replace(placement, samples=tuple(samples))


def replace_layers(placement: CompactTask, layers: Sequence[int]) -> CompactTask:
    """Return the placement with other layers per stage."""
    return replace(placement, layers=tuple(layers))
