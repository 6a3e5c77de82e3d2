"""Who grows arms and advances walks: this process, or several. Jobs are independent, so the results are the same."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Protocol

from plans.cost.model import CostModel
from plans.search.balancing import Balancing
from plans.search.budget import Clock, Meter
from plans.search.evolution import ArmState, Evolution, EvolutionSettings
from plans.search.genome import Genome
from plans.search.limits import Limits
from plans.search.polish import Polish, WalkState
from plans.search.pricing import Price
from plans.search.problem import Problem
from plans.search.run import Incumbent
from plans.search.tools import SearchTools
from plans.spec.cluster import Cluster
from plans.spec.job import Job

#: Seconds between looks at the clock and the stop request while workers work.
POLL_S = 0.2


@dataclass(slots=True)
class Task:
    """A piece of work: evaluations to spend on an arm or a walk."""

    state: ArmState | WalkState
    """The arm or walk; the crew returns it changed."""
    evaluations: int
    """Most evaluations."""
    temperature: tuple[float, float] = (0.0, 0.0)
    """Temperature factor of a walk at the start and the end of the piece."""


class Workshop:
    """Tools of one process."""

    def __init__(self, problem: Problem, settings: EvolutionSettings, balancing: Balancing) -> None:
        """Build the tools."""
        self.tools = SearchTools(problem, balancing)
        self.evolution = Evolution(self.tools, settings)
        self.polish = Polish(self.tools, self.evolution)

    def do(self, task: Task, keep_going: Callable[[], bool], on_improved: Callable[[Price, Genome], None]) -> int:
        """Do a piece of work; return the evaluations used."""
        state = task.state
        if isinstance(state, ArmState):
            return self.evolution.grow(state, task.evaluations, keep_going, on_improved)
        first, last = task.temperature

        def cooling(step: int) -> float:
            return first + (last - first) * step / max(1, task.evaluations)

        return self.polish.walk(state, task.evaluations, cooling, keep_going, on_improved)


class Crew(Protocol):
    """Does pieces of work and reports improvements to the incumbent."""

    def run(self, tasks: Sequence[Task]) -> list[ArmState | WalkState]:
        """Return the states of the tasks, changed, in order."""
        ...

    def close(self) -> None:
        """End helper processes."""
        ...


class LocalCrew:
    """Works in this process."""

    def __init__(self, workshop: Workshop, incumbent: Incumbent[Genome]) -> None:
        """Keep tools and incumbent."""
        self._workshop = workshop
        self._incumbent = incumbent

    def run(self, tasks: Sequence[Task]) -> list[ArmState | WalkState]:
        """Return the states of the tasks, changed, in order."""
        meter, pricer = self._incumbent.run.meter, self._workshop.tools.pricer
        for task in tasks:
            before, counted = meter.evaluations, pricer.count

            def improved(price: Price, genome: Genome, start: int = before, offset: int = counted) -> None:
                meter.evaluations = start + pricer.count - offset
                self._incumbent.offer(price.score_s, genome)

            used = self._workshop.do(_within(task, meter), lambda: not meter.is_spent, improved)
            meter.evaluations = before + used
        self._incumbent.report()
        return [task.state for task in tasks]

    def close(self) -> None:
        """Nothing to end."""


class PoolCrew:
    """Works in several processes; each builds its tools once."""

    def __init__(
        self, problem: Problem, settings: EvolutionSettings, balancing: Balancing, incumbent: Incumbent[Genome]
    ) -> None:
        """Start the processes."""
        self._incumbent = incumbent
        self._pool = ProcessPoolExecutor(
            max_workers=incumbent.run.workers,
            mp_context=get_context("spawn"),
            initializer=_start_worker,
            initargs=(
                problem.cluster.model_dump_json(exclude_none=True),
                problem.job.model_dump_json(exclude_none=True),
                problem.model,
                problem.limits,
                settings,
                balancing,
            ),
        )

    def run(self, tasks: Sequence[Task]) -> list[ArmState | WalkState]:
        """Return the states of the tasks, changed, in order; those not begun when the budget ends stay as they are."""
        meter = self._incumbent.run.meter
        states: list[ArmState | WalkState] = [task.state for task in tasks]
        waiting = list(enumerate(tasks))[::-1]
        busy: dict[Future[tuple[ArmState | WalkState, int]], int] = {}
        planned = meter.evaluations
        while waiting or busy:
            while waiting and len(busy) < 2 * self._incumbent.run.workers and not meter.is_spent:
                index, task = waiting.pop()
                piece = _within(task, meter, planned)
                planned += piece.evaluations
                busy[self._pool.submit(_work, piece, meter.clock, _seconds_left(meter))] = index
            if not busy:
                break
            done, _ = wait(busy, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda item: busy[item]):
                index = busy.pop(future)
                states[index], used = future.result()
                meter.spend(used)
                self._offer(states[index])
        self._incumbent.report()
        return states

    def _offer(self, state: ArmState | WalkState) -> None:
        if state.best is not None:
            self._incumbent.offer(state.best[0].score_s, state.best[1])

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def make_crew(
    problem: Problem,
    workshop: Workshop,
    settings: EvolutionSettings,
    balancing: Balancing,
    incumbent: Incumbent[Genome],
) -> Crew:
    """Return a crew of as many processes as the run asks for."""
    if incumbent.run.workers <= 1:
        return LocalCrew(workshop, incumbent)
    return PoolCrew(problem, settings, balancing, incumbent)


def _within(task: Task, meter: Meter, planned: int | None = None) -> Task:
    """Return the task cut to what a counted budget has left."""
    limit = meter.budget.evaluations
    if limit is None:
        return task
    used = meter.evaluations if planned is None else planned
    return Task(task.state, max(0, min(task.evaluations, limit - used)), task.temperature)


def _seconds_left(meter: Meter) -> float | None:
    return None if meter.budget.seconds is None else meter.budget.seconds - meter.elapsed_s


_WORKSHOP: list[Workshop] = []
"""The tools of a worker process; filled by its initializer."""


def _start_worker(
    cluster: str, job: str, model: CostModel, limits: Limits, settings: EvolutionSettings, balancing: Balancing
) -> None:
    """Build the tools of a worker from the documents (the values themselves hold views that cannot travel)."""
    # Ctrl-C belongs to the parent, which asks the workers to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    problem = Problem(Cluster.model_validate_json(cluster), Job.model_validate_json(job), model, limits)
    _WORKSHOP.append(Workshop(problem, settings, balancing))


def _work(task: Task, clock: Clock | None, limit_s: float | None) -> tuple[ArmState | WalkState, int]:
    begin = clock() if clock is not None else 0.0

    def keep_going() -> bool:
        return limit_s is None or clock is None or clock() - begin < limit_s

    used = _WORKSHOP[0].do(task, keep_going, lambda _price, _genome: None)
    return task.state, used
