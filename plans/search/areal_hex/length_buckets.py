"""Rollouts to suited replicas by length (StreamRL's idea, problem 9 of areal_hex.md 1.6): h depends on the bucket.

The batch is cut into buckets of equal counts along its length distribution. Long ones go to replicas whose decode steps
are fastest, so that the tail of the batch is short, and start first; the others fill what is left of every replica's
time. The time looked at is the p95 of the batch: its longest response is the one that a batch exceeds once in twenty.

It needs a prediction of each rollout's length; without one, rollouts reach replicas in any order and nothing is won.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from plans.cost.compact import CompactTask
from plans.cost.evaluator import PlanEvaluator
from plans.cost.lengths import LengthMoments, moments_of
from plans.spec.job import Job, Lengths
from plans.workflow import RlTask

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Buckets that a batch is cut into.
BUCKETS = 8
#: Share of batches whose longest response is no longer than what is planned for.
TAIL = 0.95
#: Points at which the quantile function of a bucket is averaged.
_POINTS = 64
#: Halvings of the deadline.
_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rollouts of similar length."""

    rollouts: int
    """Rollouts of an iteration in it."""
    shortest: float
    """Lower end, tokens."""
    mean: float
    """Mean response length, tokens."""
    longest: float
    """Upper end, tokens; of the last bucket the p95 of the longest in it."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """Rollouts per replica, and how long the slowest takes."""

    counts: IntArray
    """Rollouts by replica and bucket [R, W]."""
    seconds: float
    """p95 of the rollout time."""

    def lengths(self, buckets: Sequence[Bucket], replica: int) -> tuple[int, int]:
        """Return the shortest and longest response of a replica's buckets, tokens; it has at least one rollout."""
        used = np.flatnonzero(self.counts[replica])
        return max(1, math.floor(buckets[used[0]].shortest)), math.ceil(buckets[used[-1]].longest)


def cut_by_length(moments: LengthMoments, rollouts: int, most: int = BUCKETS) -> tuple[Bucket, ...]:
    """Return the buckets of a batch, shortest first; a single one where all responses are equally long.

    Args:
        moments: the length distribution, log-normal, cut at its maximum.
        rollouts: rollouts of an iteration.
        most: buckets at most.
    """
    number = 1 if moments.response_std == 0.0 else min(most, rollouts)
    edges = [rollouts * index // number for index in range(number + 1)]
    return tuple(_bucket(moments, first, stop, rollouts) for first, stop in pairwise(edges))


def deal(rates: FloatArray, spans: FloatArray, step_s: Sequence[float], sizes: Sequence[int]) -> Dealt:
    """Deal buckets to replicas: the longest to the fastest steps, by the least deadline that holds all of them.

    Longest first, a replica is done when its work is, sum_w n_w * rate_w, but not before its longest rollout is.

    Args:
        rates: seconds per rollout of a replica that is kept full [R, W].
        spans: seconds from the first to the last token of a bucket's longest response [R, W].
        step_s: seconds per decode step [R]; replicas are filled in ascending order.
        sizes: rollouts per bucket [W], shortest bucket first.
    """
    order = sorted(range(len(step_s)), key=lambda index: (step_s[index], index))
    # To begin with, the replica that is fastest at it takes everything.
    alone = np.maximum(rates @ np.array(sizes), spans[:, -1])
    best: IntArray = np.zeros(rates.shape, dtype=np.int64)
    best[int(alone.argmin())] = sizes
    low, high = 0.0, float(alone.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        counts = _filled(rates, spans, order, sizes, middle)
        if counts is None:
            low = middle
        else:
            high, best = middle, counts
    return Dealt(best, float(_seconds(rates, spans, best).max()))


class LengthDealer:
    """Deals the rollouts of a job to replicas of a rollout plan."""

    def __init__(self, evaluator: PlanEvaluator) -> None:
        """Cut the batch and prepare the prices of every bucket."""
        job = evaluator.job
        self.buckets = cut_by_length(moments_of(job.lengths), job.num_samples)
        self._priced = [_evaluator_of(evaluator, bucket.mean, bucket.longest) for bucket in self.buckets]
        self._prefill = _evaluator_of(evaluator, 1e-9, 1.0)

    def deal(self, placements: Sequence[tuple[CompactTask, int]]) -> Dealt:
        """Return the rollouts of each replica.

        Args:
            placements: one replica each, with its decode batch.
        """
        rates = np.array([[self._rate(e, task, batch) for e in self._priced] for task, batch in placements])
        prefill = np.array([self._rate(self._prefill, task, batch) for task, batch in placements])
        means = np.array([bucket.mean for bucket in self.buckets])
        batches = np.array([batch for _, batch in placements], dtype=np.float64)
        steps = (rates - prefill[:, None]) * batches[:, None] / means[None, :]
        spans = steps * np.array([bucket.longest for bucket in self.buckets])[None, :]
        return deal(rates, spans, steps[:, -1].tolist(), [bucket.rollouts for bucket in self.buckets])

    @staticmethod
    def _rate(evaluator: PlanEvaluator, task: CompactTask, batch: int) -> float:
        return evaluator.replica_s(RlTask.ACTOR_GENERATION, task, 0, batch, batch) / batch


def _bucket(moments: LengthMoments, first: int, stop: int, total: int) -> Bucket:
    low, high = first / total, stop / total
    points = low + (np.arange(_POINTS) + 0.5) / _POINTS * (high - low)
    mean = float(np.mean([_quantile(moments, float(point)) for point in points]))
    # The longest of n rollouts of the last bucket: none of all batches' longest is longer in 95 of 100.
    top = high if stop < total else TAIL ** (1.0 / total)
    shortest, longest = _quantile(moments, low), _quantile(moments, top)
    return Bucket(stop - first, min(shortest, mean), mean, max(longest, mean))


def _quantile(moments: LengthMoments, share: float) -> float:
    if moments.response_std == 0.0:
        return moments.response
    if share <= 0.0:
        return 1.0
    variance = math.log1p((moments.response_std / moments.response) ** 2)
    centre = math.log(moments.response) - variance / 2.0
    value = math.exp(centre + NormalDist().inv_cdf(share) * math.sqrt(variance))
    return min(moments.response_max, max(1.0, value))


def _evaluator_of(evaluator: PlanEvaluator, mean: float, longest: float) -> PlanEvaluator:
    lengths = evaluator.job.lengths
    job: Job = evaluator.job.model_copy(
        update={
            "lengths": Lengths(
                prompt=lengths.prompt,
                prompt_mean=lengths.prompt_mean,
                response=max(1, math.ceil(longest)),
                response_mean=mean,
            )
        }
    )
    return PlanEvaluator(evaluator.cluster, job, evaluator.model)


def _filled(
    rates: FloatArray, spans: FloatArray, order: Sequence[int], sizes: Sequence[int], deadline_s: float
) -> IntArray | None:
    """Return rollouts by replica and bucket that end by a deadline; None where some are left over."""
    counts = np.zeros(rates.shape, dtype=np.int64)
    left = list(sizes)
    bucket = len(left) - 1
    for replica in order:
        budget = deadline_s if spans[replica, bucket] <= deadline_s else 0.0
        while bucket >= 0:
            taken = min(left[bucket], int(budget / rates[replica, bucket] + 1e-9))
            counts[replica, bucket] += taken
            left[bucket] -= taken
            budget -= taken * rates[replica, bucket]
            if left[bucket]:
                break
            bucket -= 1
        if bucket < 0:
            return counts
    return None


def _seconds(rates: FloatArray, spans: FloatArray, counts: IntArray) -> FloatArray:
    """Return the seconds of every replica: its work, or its longest rollout."""
    used = counts > 0
    last = counts.shape[1] - 1 - used[:, ::-1].argmax(axis=1)
    longest = np.where(used.any(axis=1), spans[np.arange(len(counts)), last], 0.0)
    seconds: FloatArray = np.maximum((rates * counts).sum(axis=1), longest)
    return seconds
