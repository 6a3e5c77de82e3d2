"""From classes to plans: a layout per class, built from the split and mixes that make its bound, and descent over them.

Heuristic: it only makes plans, it proves nothing. For a class the best shared layer split and the mixes of machines of
its replicas are read back from the dynamic program of `splits`; stages are laid out in the split's order. Layers,
samples and decode batches then follow from the balancing rule as for any candidate. The descent changes one task at a
time to another of its cheapest classes while the plan gets cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np

from plans.search.brute_force import JointSearch
from plans.search.brute_force_walk import TaskClass
from plans.search.genome import Genome
from plans.search.groupings import Grouping
from plans.search.ilp.book import BoundBook
from plans.search.ilp.classes import Column
from plans.search.ilp.replicas import CellTimes
from plans.search.ilp.splits import best_shared_split
from plans.search.layouts import TaskLayout
from plans.search.pricing import Price
from plans.workflow import RlTask, TaskKind

#: Cheapest classes of a task that the descent looks at, and rounds over all tasks.
POOL, ROUNDS = 8, 3

MachineGrid = tuple[tuple[int, ...], ...]
"""Machine of each stage of each replica [dp][pp]."""


class Rounder:
    """Makes candidates from classes."""

    def __init__(
        self,
        search: JointSearch,
        book: BoundBook,
        columns: Mapping[RlTask, Sequence[Column]],
        keep_going: Callable[[], bool],
    ) -> None:
        """Keep the bounds and the classes; `keep_going` is asked before each pricing."""
        self.search, self.book, self.columns, self.keep_going = search, book, columns, keep_going
        self._grids: dict[tuple[RlTask, TaskClass], MachineGrid | None] = {}

    def descend(
        self, grouping: Grouping, classes: Mapping[RlTask, TaskClass], offer: Callable[[Price, Genome], None]
    ) -> None:
        """Offer the candidates on a descent from the given classes."""
        chosen = {task: self._layouts(task, cls)[:1] for task, cls in classes.items()}
        if not all(chosen.values()) or not self.keep_going():
            return
        layouts = {task: options[0] for task, options in chosen.items()}
        best = self._price(grouping, layouts, offer)
        for _ in range(ROUNDS):
            before = best
            for task in layouts:
                pool = dict.fromkeys([classes[task], *(column.cls for column in self.columns[task][:POOL])])
                for option in (layout for cls in pool for layout in self._layouts(task, cls)):
                    if not self.keep_going():
                        return
                    price = self._price(grouping, {**layouts, task: option}, offer)
                    if price is not None and (best is None or price < best):
                        best, layouts = price, {**layouts, task: option}
            if best == before:
                return

    def _price(
        self,
        grouping: Grouping,
        layouts: Mapping[RlTask, tuple[MachineGrid, TaskLayout]],
        offer: Callable[[Price, Genome], None],
    ) -> Price | None:
        genome = self._named(grouping, layouts)
        if genome is None:
            return None
        price = self.search.price(genome)
        offer(price, genome)
        return price

    def _named(self, grouping: Grouping, layouts: Mapping[RlTask, tuple[MachineGrid, TaskLayout]]) -> Genome | None:
        """Return the candidate on the first free GPUs of each machine; None where they don't suffice."""
        start = [0] * self.search.num_machines
        placed: dict[RlTask, TaskLayout] = {}
        gpus: list[tuple[int, ...]] = []
        for tasks in grouping:
            need = [0] * self.search.num_machines
            members: set[int] = set()
            for task in tasks:
                grid, layout = layouts[task]
                layout, used = self._label(grid, layout, start)
                need = [max(a, b) for a, b in zip(need, used, strict=True)]
                placed[task] = layout
                members.update(layout.gpus)
            start = [a + b for a, b in zip(start, need, strict=True)]
            gpus.append(tuple(sorted(members)))
            if any(a > len(all_) for a, all_ in zip(start, self.search.members, strict=True)):
                return None
        ordered = {task: placed[task] for task in self.search.problem.workflow.tasks}
        return Genome(grouping, tuple(gpus), ordered)

    def _label(self, grid: MachineGrid, layout: TaskLayout, start: Sequence[int]) -> tuple[TaskLayout, list[int]]:
        taken = [0] * self.search.num_machines
        gpus: list[int] = []
        for row in grid:
            for machine in row:
                members, begin = self.search.members[machine], start[machine] + taken[machine]
                gpus += [members[(begin + k) % len(members)] for k in range(layout.tp)]
                taken[machine] += layout.tp
        return TaskLayout(layout.dp, layout.pp, layout.tp, tuple(gpus), layout.split), taken

    def _layouts(self, task: RlTask, cls: TaskClass) -> list[tuple[MachineGrid, TaskLayout]]:
        """Return the ways to lay a class out: stage order, replica order, layer rule; GPUs are named later."""
        key = (task, cls)
        if key not in self._grids:
            self._grids[key] = self._grid(task, cls)
        grid = self._grids[key]
        if grid is None:
            return []
        d = cls.degrees
        shapes = dict.fromkeys(
            tuple(tuple(row[::step]) for row in grid[::turn]) for step, turn in product((1, -1), (1, -1))
        )
        return [
            (shape, TaskLayout(d.dp, d.pp, d.tp, (), split)) for shape in shapes for split in self.search.splits(d.pp)
        ]

    def _grid(self, task: RlTask, cls: TaskClass) -> MachineGrid | None:
        bounds, d = self.book.of[task], cls.degrees
        table = bounds.mix_table(d)
        if table is None or any(count % d.tp for count in cls.counts):
            return None
        if task.kind is TaskKind.GENERATION and bounds.terms.decode is not None:
            batch = np.array([float(min(bounds.cap, bounds.samples))])
            while batch[0] >= 1.0:  # the largest batch, halved, at which the class holds its cache
                cells = bounds.cells.decoding(bounds.terms.decode, d.pp, d.tp, batch)
                grid = self._best_grid(cells, cls, bounds.terms.num_layers, task)
                if grid is not None:
                    return grid
                batch = np.floor(batch / 2.0)
            return None
        return self._best_grid(bounds.cells.plain(d.pp, d.tp, d.dp), cls, bounds.terms.num_layers, task)

    def _best_grid(self, cells: CellTimes, cls: TaskClass, num_layers: int, task: RlTask) -> MachineGrid | None:
        table = self.book.of[task].mix_table(cls.degrees)
        if table is None:
            return None
        pure = tuple(count // cls.degrees.tp for count in cls.counts)
        return best_shared_split(cells, table, cls.degrees.dp, num_layers, pure)
