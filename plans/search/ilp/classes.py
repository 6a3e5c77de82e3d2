"""Classes of placements of every task, with their bounds and memory: the columns of the program."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from plans.memory import TaskMemory
from plans.search.brute_force import JointSearch
from plans.search.brute_force_walk import TaskClass, counts_of
from plans.search.ilp.book import BoundBook
from plans.workflow import RlTask, TaskKind

#: Classes of all tasks together, a kilobyte each: some 32 GPUs in machines of eight.
MOST_CLASSES = 1_000_000
#: Classes of a task that are made whatever the budget, in a fraction of a second.
UNASKED_CLASSES = 500


@dataclass(slots=True)
class Column:
    """One class of placements of a task."""

    task: RlTask
    """The task."""
    cls: TaskClass
    """Degrees and GPUs per machine."""
    seconds: float
    """Proved lower bound of the task over the class; of generation with all memory that there is."""
    held_bytes: float
    """Resident bytes of the task, summed over its GPUs (exact: they don't depend on the layer split)."""
    working_bytes: float
    """Proved lower bound of its working bytes, summed over its GPUs; 0 for generation."""
    is_tight: bool = False
    """Whether nothing more can be found out about `seconds` by enumerating the class alone."""
    edges: list[float] = field(default_factory=list)
    """Limits of the intervals of sequences decoded together, summed over GPUs (generation)."""


class TooManyClassesError(Exception):
    """The classes of a problem are too many for the memory, or for the budget."""


def require_few_classes(search: JointSearch) -> None:
    """Refuse a problem with more classes than `MOST_CLASSES`, without making them.

    Raises:
        TooManyClassesError: it has more.
    """
    ways = np.ones(1)  # [size]: choices of so many GPUs by machine
    for members in search.members:
        ways = np.convolve(ways, np.ones(len(members) + 1))
    tasks = search.problem.workflow.tasks
    count = sum(float(ways[degrees.size]) for task in tasks for degrees in search.classes(task))
    if not count <= MOST_CLASSES:
        raise TooManyClassesError


def make_columns(
    search: JointSearch, book: BoundBook, task: RlTask, is_late: Callable[[], bool] = lambda: False
) -> list[Column]:
    """Return every class of a task that can hold its model, fastest bound first.

    Args:
        search: the problem's plans.
        book: bounds.
        task: the task.
        is_late: asked before a class beyond the first `UNASKED_CLASSES`.

    Raises:
        TooManyClassesError: it was late before all classes were made.
    """
    memory = TaskMemory(search.problem.job, task)
    rows: list[Column] = []
    sizes = [len(members) for members in search.members]
    capacity = book.of[task].capacity_bytes
    for degrees in search.classes(task):
        layers = memory.shape.layers
        held = degrees.dp * degrees.tp * _line_bytes(memory, layers, degrees.pp, degrees.tp, degrees.dp)
        working = _working_bytes(memory, search, degrees.dp, degrees.pp, degrees.tp)
        for counts in counts_of(degrees.size, sizes):
            cls = TaskClass(degrees, counts)
            have = sum(n * float(room) for n, room in zip(counts, capacity, strict=True))
            if held + working > have * (1.0 + 1e-9):
                continue
            if len(rows) >= UNASKED_CLASSES and is_late():
                raise TooManyClassesError
            seconds = book.seconds(task, cls)
            if math.isfinite(seconds):
                rows.append(Column(task, cls, seconds, held, working))
    return sorted(rows, key=lambda column: (column.seconds, column.held_bytes))


def _line_bytes(memory: TaskMemory, layers: int, pp: int, tp: int, dp: int) -> float:
    """Return resident bytes of one TP rank of one replica: linear in layers, so the split does not matter."""
    if pp == 1:
        return memory.model_bytes(layers, is_first=True, is_last=True, tp=tp, dp=dp)
    first = memory.model_bytes(1, is_first=True, is_last=False, tp=tp, dp=dp)
    last = memory.model_bytes(1, is_first=False, is_last=True, tp=tp, dp=dp)
    return first + last + (layers - 2) * memory.model_bytes(1, is_first=False, is_last=False, tp=tp, dp=dp)


def _working_bytes(memory: TaskMemory, search: JointSearch, dp: int, pp: int, tp: int) -> float:
    """Return a bound on working bytes: linear in layers too, with one micro-batch in flight at least."""
    if memory.task.kind is TaskKind.GENERATION:
        return 0.0
    training = memory.task.kind is TaskKind.TRAINING
    mbs = search.problem.job.training.micro_batch_size if training else 1

    def of(layers: int, stage: int) -> float:
        return memory.working_bytes(
            layers, stage=stage, num_stages=pp, tp=tp, dp=dp, micro_batch_size=mbs, micro_batches=1
        )

    if pp == 1:
        return dp * tp * of(memory.shape.layers, 0)
    inner = of(2, 0) - of(1, 0)
    fixed = (pp - 1) * (of(1, 0) - inner) + (of(1, pp - 1) - inner)
    return dp * tp * (fixed + memory.shape.layers * inner)
