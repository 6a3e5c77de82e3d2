"""The iteration if tasks without a shared GPU overlap freely inside their phase: the makespan of HetRL's exact program.

HetRL's prose gives each task a start and an end, precedence between dependent tasks, and minimises the last end. All
training depends on all inference and that on generation, so what differs from the phases with barriers is that two
tasks of a phase follow each other only where they share a GPU, not already where they share a group (reconstruction,
hetrl.md 9, rows 10 to 12). Never above the exact value of the phases.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from enum import StrEnum
from itertools import permutations

from plans.spec.job import Mode
from plans.workflow import RlTask, TaskKind


class Objective(StrEnum):
    """Seconds that a search minimises."""

    PHASES = "phases"
    """`iteration_s`: phases with barriers, tasks of a group one after the other."""
    FREE_OVERLAP = "free_overlap"
    """`free_overlap_s`: tasks that share no GPU side by side."""


def makespan_s(seconds: Mapping[RlTask, float], gpus: Mapping[RlTask, Set[int]]) -> float:
    """Return the least time in which tasks finish when those that share a GPU don't overlap.

    Exact: in an optimal schedule each task starts when the tasks before it in some order that share a GPU with it have
    ended; all orders are tried (a phase has at most three tasks). A task absent from `gpus` shares with none.
    """
    tasks = list(seconds)
    if not tasks:
        return 0.0
    meets = {
        (a, b) for a in tasks for b in tasks if a is not b and not gpus.get(a, frozenset()).isdisjoint(gpus.get(b, ()))
    }
    if not meets:
        return max(seconds.values())
    return min(_end_s(order, seconds, meets) for order in permutations(tasks))


def free_overlap_s(
    mode: Mode, seconds: Mapping[RlTask, float], gpus: Mapping[RlTask, Set[int]], transfer_s: float
) -> float:
    """Return the seconds of an iteration, given the seconds and GPUs of its tasks."""
    generation = seconds[RlTask.ACTOR_GENERATION]
    inference, training = (
        makespan_s({task: s for task, s in seconds.items() if task.kind is kind}, gpus)
        for kind in (TaskKind.INFERENCE, TaskKind.TRAINING)
    )
    if mode is Mode.SYNC:
        return generation + inference + training + transfer_s
    return max(generation, inference + training) + transfer_s


def _end_s(order: tuple[RlTask, ...], seconds: Mapping[RlTask, float], meets: Set[tuple[RlTask, RlTask]]) -> float:
    ends: dict[RlTask, float] = {}
    for task in order:
        ends[task] = seconds[task] + max((end for other, end in ends.items() if (task, other) in meets), default=0.0)
    return max(ends.values())
