"""Another role for some devices: the plan in force with GPUs moved between generation and everything else.

A change between dealing the same shards anew and a search over all placements (extension). A drift says that one side
takes longer than its plan promised; the search would price both sides by the model that was wrong. Here the phases of
every candidate are scaled by what was measured of the side that they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from plans.plan import Plan
from plans.search.balancing import Balancing
from plans.search.genome import Genome
from plans.search.outcome import outcome_of
from plans.search.problem import Problem
from plans.search.protocol import Outcome
from plans.search.run import Incumbent, SearchRun
from plans.search.tools import SearchTools
from plans.workflow import RlTask

Pools = tuple[tuple[int, ...], tuple[int, ...]]
"""GPU indices of generation, and of all other tasks."""


class Phases(Protocol):
    """Seconds of the phases of a priced plan."""

    @property
    def generation_s(self) -> float:
        """Actor generation."""
        ...

    @property
    def inference_s(self) -> float:
        """Phi of the inference tasks."""
        ...

    @property
    def training_s(self) -> float:
        """Phi of the training tasks."""
        ...

    @property
    def transfer_s(self) -> float:
        """Weight sync."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFactors:
    """Measured over promised seconds of both sides of an asynchronous run."""

    producer: float
    """Of generation and inference, > 0."""
    consumer: float
    """Of training and weight sync, > 0."""

    def iteration_s(self, phases: Phases) -> float:
        """Return the seconds of an iteration with its phases scaled: the slower side, then the weight sync.

        Example:
            generation 10 s, inference 2 s, training 6 s, transfer 1 s, factors 2 and 1: max(20, 4 + 6) + 1 = 21 s.
        """
        rest = self.producer * phases.inference_s + self.consumer * phases.training_s
        return max(self.producer * phases.generation_s, rest) + self.consumer * phases.transfer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipRolesPlanner:
    """Tries every change of role of one machine's GPUs, and every exchange of two machines' roles."""

    name: ClassVar[str] = "flip-roles"
    standing: Plan
    """The plan in force; generation has a group of its own in it."""
    factors: SideFactors
    """What was measured."""

    def search(self, problem: Problem, run: SearchRun) -> Outcome:
        """Return the flipped plan with the shortest scaled iteration; it may be longer than the standing one's."""
        tools = SearchTools(problem, Balancing())
        incumbent: Incumbent[Genome] = Incumbent(run, phase="flip roles")
        others = tuple(task for task in problem.workflow.tasks if task is not RlTask.ACTOR_GENERATION)
        grouping = ((RlTask.ACTOR_GENERATION,), others)
        least = [problem.least_gpus(tasks) for tasks in grouping]
        for pools in flipped_pools(_pools(problem, self.standing), problem.view.machine_of.tolist()):
            if run.meter.is_spent:
                break
            if any(len(pool) < count for pool, count in zip(pools, least, strict=True)):
                continue
            genome = tools.seeder.fitted(grouping, pools)
            evaluation = tools.pricer.evaluation(genome)
            run.meter.spend()
            if evaluation is not None and evaluation.feasible:
                incumbent.offer(self.factors.iteration_s(evaluation.phases), genome)
        return outcome_of(problem, tools, incumbent, self.name)


def flipped_pools(pools: Pools, machine_of: list[int]) -> Iterator[Pools]:
    """Yield every pair of pools one flip away, without repetition.

    A flip gives one machine's GPUs of a side, one, half or all of them, to the other side; or exchanges all GPUs that a
    machine has on one side for all that another machine has on the other. No side is left empty.

    Args:
        pools: GPU indices of both sides.
        machine_of: machine of each GPU.
    """
    seen = {_key(pools)}
    for candidate in (*_moves(pools, machine_of), *_exchanges(pools, machine_of)):
        key = _key(candidate)
        if key not in seen and all(candidate):
            seen.add(key)
            yield key


def _moves(pools: Pools, machine_of: list[int]) -> Iterator[Pools]:
    for giver in (0, 1):
        for members in _by_machine(pools[giver], machine_of).values():
            for count in sorted({1, math.ceil(len(members) / 2), len(members)}):
                moved = members[-count:]
                kept = tuple(gpu for gpu in pools[giver] if gpu not in moved)
                grown = (*pools[1 - giver], *moved)
                yield (kept, grown) if giver == 0 else (grown, kept)


def _exchanges(pools: Pools, machine_of: list[int]) -> Iterator[Pools]:
    generating, others = (_by_machine(pool, machine_of) for pool in pools)
    for first, given in generating.items():
        for second, taken in others.items():
            if first != second:
                yield (
                    (*(gpu for gpu in pools[0] if gpu not in given), *taken),
                    (*(gpu for gpu in pools[1] if gpu not in taken), *given),
                )


def _key(pools: Pools) -> Pools:
    return tuple(sorted(pools[0])), tuple(sorted(pools[1]))


def _by_machine(gpus: tuple[int, ...], machine_of: list[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for gpu in gpus:
        found[machine_of[gpu]] = (*found.get(machine_of[gpu], ()), gpu)
    return found


def _pools(problem: Problem, plan: Plan) -> Pools:
    index = problem.view.gpu_index
    generating = {index[gpu] for gpu in plan.tasks[RlTask.ACTOR_GENERATION].gpus}
    others = {
        index[gpu] for task, placed in plan.tasks.items() if task is not RlTask.ACTOR_GENERATION for gpu in placed.gpus
    }
    return tuple(sorted(generating)), tuple(sorted(others - generating))
