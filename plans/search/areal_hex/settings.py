"""Switches of the method: every repair of the printed formulation by name (areal_hex.md 1.6), all on by default."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class SyncPlace(StrEnum):
    """Where the weight update counts when the two sides are compared (problem 5)."""

    OUTSIDE = "outside"
    """It blocks both sides: max(C_T, C_I) + C_UPDATE, as the paper's evaluation measures and the cost model prices."""
    IN_ROLLOUT = "in_rollout"
    """It is a part of C_I, as the paper's formulation writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArealHexSettings:
    """What the method does; `printed()` is the paper's text."""

    knapsack_counts: bool = True
    """Problem 1: replica counts by an integer knapsack, which is linear and safe at y = 0. Off: types are filled
    greedily by tokens per GPU, the usual way around the product of two unknowns."""
    whole_rollouts: bool = True
    """Problem 1: rollouts are whole; the least deadline whose floors add up to the batch. Off: fractional shares,
    rounded afterwards."""
    share_band: bool = True
    """Problem 2: training's share of compute lies in a band of half a step. Off: it must equal the midpoint."""
    infinite_empty_side: bool = True
    """Problem 3: a side that cannot run costs infinity and the bisection goes on. Off: it ends there."""
    keep_best: bool = True
    """Problem 4: the best split seen is returned. Off: the last one."""
    swap_search: bool = True
    """Problem 4: GPUs change sides one step at a time from the best split while that gains."""
    sync_place: SyncPlace = SyncPlace.OUTSIDE
    """Problem 5: where the weight update counts."""
    tail_aware: bool = True
    """Problem 6: rollout times include the longest response of the last wave. Off: expected length only."""
    mean_bandwidth: bool = True
    """Problem 7: training's links count as the mean over its pairs of GPUs. Off: as the sum, which grows with the
    square of the group."""
    fanout_aware: bool = True
    """Problem 8: the weight update's fan-out is priced with each split, and rollout machines that cost more by it than
    they generate stay idle. Off: the update is left out of every comparison."""
    dp_across_types: bool = False
    """Extension, off by default: data-parallel replicas of training may lie on different GPU types, each with samples
    by its speed. The paper's pruning rule forbids it."""
    pipelined_rollouts: bool = True
    """Whether rollout replicas may have pipeline stages where TP alone holds the model. HetRL's model charges a decode
    step the slowest stage, not the sum of the stages, so it rates such replicas higher than an engine does."""
    length_buckets: bool = False
    """Problem 9, extension, off by default: rollouts go to replicas by their predicted length, long ones to fast decode
    steps, and sides are compared by the p95 of the batch. `price` and `iteration_s` know one length distribution and
    stay without it; the simulator executes it (`Dispatch.BUCKETS`)."""
    patience: int = 20
    """K: rounds without improvement after which the alternation ends."""
    splits_per_round: int = 2
    """Splits of a band that are priced, best objective first; the paper prices one."""

    @classmethod
    def printed(cls) -> ArealHexSettings:
        """Return the text of the paper with nothing repaired; it ends at its first step (problem 3)."""
        return cls(
            knapsack_counts=False,
            whole_rollouts=False,
            share_band=False,
            infinite_empty_side=False,
            keep_best=False,
            swap_search=False,
            sync_place=SyncPlace.IN_ROLLOUT,
            tail_aware=False,
            mean_bandwidth=False,
            fanout_aware=False,
            splits_per_round=1,
        )

    @classmethod
    def runnable_printed(cls) -> ArealHexSettings:
        """Return the paper's text with only what it needs to run at all: repairs 2 and 3."""
        return replace(cls.printed(), share_band=True, infinite_empty_side=True)
