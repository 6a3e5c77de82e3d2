"""Classes of placements of every task, with their bounds and memory: the columns of the program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from plans.memory import TaskMemory
from plans.search.brute_force import JointSearch, TaskClass, counts_of
from plans.search.ilp.book import BoundBook
from plans.workflow import RlTask, TaskKind


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


def make_columns(search: JointSearch, book: BoundBook, task: RlTask) -> list[Column]:
    """Return every class of a task that can hold its model, fastest bound first."""
    memory, rows = TaskMemory(search.problem.job, task), []
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
