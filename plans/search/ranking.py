"""Layouts of one task on one set of GPUs, ranked by their own cost: what seeds and mutations draw from (extension).

A small coordinate search over recipes instead of a full enumeration (`plans.search.compiled.ranking`). Results are kept
per task and set of GPUs; equal models of one kind share them.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from plans.cost.cache import BoundedCache
from plans.search.guesses import LayoutGuesses
from plans.search.layouts import TaskLayout
from plans.search.pricing import Pricer
from plans.search.problem import Problem
from plans.search.ranked_layout import RankedLayout
from plans.workflow import RlTask, TaskKind, shape_of

#: Steps of a GPU's memory in which what companions hold of it is counted.
HELD_LEVELS = 32
#: Most GPUs for a deep ranking.
DEEP_GPUS = 128
#: GPU indices kept in the cache in all.
CACHE_GPUS = 4_000_000
#: GPUs times entries of the cache of guess sources.
GUESS_GPUS = 200_000
#: Sets of GPUs of which the representative is kept.
REPRESENTATIVES = 200


class Ranking(NamedTuple):
    """Layouts of a task on a set of GPUs, fastest first."""

    entries: tuple[RankedLayout, ...]
    """Layouts on the set's representative."""
    gpus: dict[int, int]
    """GPU of the representative -> GPU of the set."""

    def layout(self, index: int) -> TaskLayout:
        """Return a layout on the set itself."""
        entry, gpus = self.entries[index], self.gpus
        return entry.on(tuple([gpus[gpu] for gpu in entry.gpus]))


class _Representative(NamedTuple):
    """The set of GPUs that stands for all sets on machines that are alike."""

    counts: tuple[int, ...]
    """Its GPUs on each machine [M]."""
    gpus: dict[int, int]
    """Its GPUs with those of the set."""


class Ranker:
    """Ranks layouts; the answers depend on the arguments only."""

    def __init__(self, problem: Problem, pricer: Pricer) -> None:
        """Keep the problem and its pricer."""
        self._problem = problem
        self._pricer = pricer
        self._cache: dict[tuple[RlTask, tuple[int, ...], int, bool], tuple[RankedLayout, ...]] = {}
        self._cached_gpus = 0
        view = problem.view
        self._machine_of: list[int] = view.machine_of.tolist()
        self._first_gpu: list[int] = view.machine_of.searchsorted(range(len(view.machine_names))).tolist()
        self._representatives: BoundedCache[tuple[int, ...], _Representative] = BoundedCache(REPRESENTATIVES)
        self._guesses: dict[tuple[RlTask, tuple[int, ...]], LayoutGuesses] = {}
        self._twin = {task: self._first_equal(task) for task in problem.workflow.tasks}

    def ranked(
        self, task: RlTask, gpus: tuple[int, ...], companions: tuple[RlTask, ...], *, deep: bool = False
    ) -> Ranking:
        """Return good layouts, fastest first, low-memory ones included.

        Sets with as many GPUs on each machine, or on machines that are alike, share one answer.

        Args:
            task: the task.
            gpus: the group's GPUs, sorted.
            companions: all tasks of the group: their models take memory that decoding could use.
            deep: try several times as many layouts (on up to `DEEP_GPUS` GPUs; else as without).
        """
        held = 0.0
        if task.kind is TaskKind.GENERATION:
            others = [self._problem.resident_bytes[other] for other in companions if other is not task]
            # Coarsely, so that groups with other companions share the answer.
            step = self._problem.largest_capacity_bytes / HELD_LEVELS
            held = round(sum(others) / len(gpus) / step) * step
        deep = deep and len(gpus) <= DEEP_GPUS
        signature, names = self._representative(gpus)
        key = (self._twin[task], signature, round(held), deep)
        found = self._cache.get(key)
        if found is None:
            guesses = self.guesses(self._twin[task], tuple(sorted(names)))
            found = self._pricer.rank(self._twin[task], guesses, held, deep=deep)
            self._cached_gpus += sum(len(entry.gpus) for entry in found) + len(gpus)
            if self._cached_gpus > CACHE_GPUS:
                self._cache.clear()
                self._cached_gpus = 0
            self._cache[key] = found
        return Ranking(found, names)

    def _representative(self, gpus: tuple[int, ...]) -> _Representative:
        """Return the representative of a set; the tasks of a group ask for it one after the other."""
        found = self._representatives.get(gpus)
        if found is None:
            found = self._find_representative(gpus)
            self._representatives.put(gpus, found)
        return found

    def _find_representative(self, gpus: tuple[int, ...]) -> _Representative:
        machines = [self._machine_of[gpu] for gpu in gpus]
        counts = Counter(machines)
        stands_for: dict[int, int] = {}
        signature = [0] * len(self._first_gpu)
        for members in self._problem.order.twins:
            held = [machine for machine in members if machine in counts]
            held.sort(key=counts.__getitem__, reverse=True)
            for place, machine in zip(members, held, strict=False):
                signature[place] = counts[machine]
                stands_for[machine] = self._first_gpu[place]
        names: dict[int, int] = {}
        for gpu, machine in zip(gpus, machines, strict=True):
            names[stands_for[machine]] = gpu
            stands_for[machine] += 1
        return _Representative(tuple(signature), names)

    def guesses(self, task: RlTask, gpus: tuple[int, ...]) -> LayoutGuesses:
        """Return the source of layouts of a task on a set of GPUs."""
        key = (self._twin[task], gpus)
        found = self._guesses.get(key)
        if found is None:
            if len(self._guesses) * len(gpus) > GUESS_GPUS:
                self._guesses.clear()
            problem, twin = self._problem, self._twin[task]
            found = self._guesses[key] = LayoutGuesses(
                problem.order,
                twin.kind,
                shape_of(problem.job, twin),
                gpus,
                least_shards=problem.least_shards(twin),
                limit=problem.limits.of(twin),
            )
        return found

    def _first_equal(self, task: RlTask) -> RlTask:
        job = self._problem.job
        return next(
            other
            for other in self._problem.workflow.tasks
            if other.kind is task.kind
            and shape_of(job, other) == shape_of(job, task)
            and self._problem.limits.of(other) == self._problem.limits.of(task)
        )
