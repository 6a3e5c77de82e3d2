"""Arms of the nested halving: a task grouping with a GPU count per group (levels 1 and 2), in bounded number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from plans.search.compositions import Composition, compositions
from plans.search.groupings import Grouping, task_groupings
from plans.search.problem import Problem
from plans.search.seeds import stream

#: GPUs per unit of a composition, by cluster size: finer than a machine only where there are few machines.
_UNITS = ((16, 1), (32, 2), (128, 4), (512, 8))
_LARGE_UNIT_SHARE = 64


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm."""

    grouping: Grouping
    """Level 1."""
    sizes: Composition
    """Level 2: GPUs per group."""

    @property
    def identity(self) -> str:
        """Text that names the arm, for random streams."""
        tasks = "/".join("+".join(task.value for task in group) for group in self.grouping)
        return f"{tasks}:{'-'.join(str(size) for size in self.sizes)}"


def unit_of(num_gpus: int) -> int:
    """Return the granularity of compositions: 1 GPU on tiny clusters, 4 at 64, N/64 on very large ones."""
    for limit, unit in _UNITS:
        if num_gpus <= limit:
            return unit
    return max(8, num_gpus // _LARGE_UNIT_SHARE)


def arms_by_grouping(problem: Problem, seed: int, *, cap: int, most_groupings: int | None = None) -> list[list[Arm]]:
    """Return the arms of every grouping that fits, the likeliest groupings first.

    Args:
        problem: cluster, job and model.
        seed: seed of the sampled compositions.
        cap: most arms per grouping; the composition proportional to the groups' work is always among them.
        most_groupings: keep only this many groupings; None = all.
    """
    total = problem.view.num_gpus
    unit, machine = unit_of(total), _usual_machine(problem)
    found: list[list[Arm]] = []
    for grouping, minimum in islice(groupings_that_fit(problem), most_groupings):
        weights = [sum(problem.work[task] for task in tasks) for tasks in grouping]
        rng = stream(seed, "compositions", grouping)
        sizes = compositions(weights, minimum, total, unit=unit, cap=cap, rng=rng, machine=machine)
        found.append([Arm(grouping, composition) for composition in sizes])
    return found


def groupings_that_fit(problem: Problem) -> Iterator[tuple[Grouping, list[int]]]:
    """Yield the groupings whose models fit, the likeliest first, with the least GPUs of each group."""
    for grouping in sorted(task_groupings(problem.workflow), key=likeliness):
        minimum = [problem.least_gpus(tasks) for tasks in grouping]
        if sum(minimum) <= problem.view.num_gpus:
            yield grouping, minimum


def _usual_machine(problem: Problem) -> int:
    """Return the GPU count that most machines have; the larger one among equals."""
    counts = [machine.count for machine in problem.cluster.machines]
    return max(set(counts), key=lambda count: (counts.count(count), count))


def likeliness(grouping: Grouping) -> tuple[int, tuple[int, ...]]:
    """Return a sort key: few groups first, then large first groups (order of trial when the budget is small)."""
    return len(grouping), tuple(-len(tasks) for tasks in grouping)
