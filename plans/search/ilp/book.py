"""Bounds of all tasks of a problem, kept by class."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plans.search.brute_force_grids import Degrees
from plans.search.brute_force_walk import TaskClass
from plans.search.ilp.bounds import DecodeCurve, TaskBounds
from plans.search.problem import Problem
from plans.workflow import RlTask


class BoundBook:
    """Lower bounds of one problem; equal questions are answered once."""

    def __init__(self, problem: Problem) -> None:
        """Build the bounds of each task."""
        self.of = {task: TaskBounds(problem.evaluator, task) for task in problem.workflow.tasks}
        self._curves: dict[tuple[Degrees, tuple[int, ...]], DecodeCurve] = {}

    def curve(self, degrees: Degrees, counts: Sequence[int]) -> DecodeCurve:
        """Return the bound on generation over a class."""
        key = (degrees, tuple(counts))
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = self.of[RlTask.ACTOR_GENERATION].decode_curve(degrees, counts)
        return curve

    def generation_s(self, degrees: Degrees, counts: Sequence[int], free_bytes: float) -> float:
        """Return a lower bound of generation with so many bytes for its cache; infinite where nothing fits.

        With fewer bytes than one sequence per replica no plan is feasible.
        """
        cache = self.of[RlTask.ACTOR_GENERATION].cache_per_gpu(degrees)
        concurrency = free_bytes / cache * (1.0 + 1e-9)
        if concurrency < degrees.size * (1.0 - 1e-9):
            return math.inf
        return self.curve(degrees, counts).seconds(concurrency)

    def most_concurrency(self, degrees: Degrees, counts: Sequence[int]) -> float:
        """Return the most sequences decoded at a time, summed over GPUs, that a class can reach."""
        bounds = self.of[RlTask.ACTOR_GENERATION]
        memory = sum(n * float(usable) for n, usable in zip(counts, bounds.usable_bytes, strict=True))
        by_cap = sum(n * float(most) for n, most in zip(counts, bounds.most_batch(degrees), strict=True))
        return min(by_cap, memory / bounds.cache_per_gpu(degrees) * (1.0 + 1e-9))

    def seconds(self, task: RlTask, cls: TaskClass) -> float:
        """Return the lower bound of a class; of generation with all memory that there is."""
        if task is RlTask.ACTOR_GENERATION:
            most = self.most_concurrency(cls.degrees, cls.counts)
            return math.inf if most < cls.degrees.size else self.curve(cls.degrees, cls.counts).seconds(most)
        return self.of[task].seconds(cls.degrees, cls.counts)
