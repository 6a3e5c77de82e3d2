"""Levels 1 to 5 of one candidate: grouping, GPUs per group, and a layout per task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plans.search.groupings import Grouping
from plans.search.layouts import TaskLayout
from plans.workflow import RlTask


@dataclass(frozen=True, slots=True)
class Genome:
    """A candidate placement; samples and layers are balanced when it is priced. Immutable."""

    grouping: Grouping
    """Level 1: tasks of each group."""
    gpus: tuple[tuple[int, ...], ...]
    """Levels 2 and 3: GPU indices of each group, sorted, disjoint."""
    layouts: Mapping[RlTask, TaskLayout]
    """Levels 4 and 5."""

    def group_of(self, task: RlTask) -> int:
        """Return the index of a task's group."""
        return next(index for index, tasks in enumerate(self.grouping) if task in tasks)

    def with_layout(self, task: RlTask, layout: TaskLayout) -> Genome:
        """Return the candidate with another layout of one task."""
        return Genome(self.grouping, self.gpus, {**self.layouts, task: layout})

    def exchanged(self, pairs: Mapping[int, int]) -> Genome:
        """Return the candidate with GPUs replaced everywhere, group sizes unchanged.

        Args:
            pairs: GPU -> its replacement; a permutation of the GPUs that it names.
        """
        touched = [bool(pairs.keys() & set(gpus)) for gpus in self.gpus]
        gpus = tuple(
            tuple(sorted(pairs.get(gpu, gpu) for gpu in members)) if hit else members
            for members, hit in zip(self.gpus, touched, strict=True)
        )
        layouts = dict(self.layouts)
        for tasks, hit in zip(self.grouping, touched, strict=True):
            if hit:
                for task in tasks:
                    layouts[task] = _replaced(layouts[task], pairs)
        return Genome(self.grouping, gpus, layouts)


def _replaced(layout: TaskLayout, pairs: Mapping[int, int]) -> TaskLayout:
    get = pairs.get
    return TaskLayout(layout.dp, layout.pp, layout.tp, tuple([get(gpu, gpu) for gpu in layout.gpus]), layout.split)
