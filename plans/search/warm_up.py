"""Machine code before the budget: compiling takes half a minute once, loading what was compiled about a second."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np

from plans.cost.compact import CompactTask
from plans.search.balancing import Balancing, TaskRates, share_samples
from plans.search.genome import Genome
from plans.search.layouts import Arrangement, LayerSplit, Recipe, TaskLayout
from plans.search.pricing import Pricer
from plans.search.problem import Problem
from plans.search.ranking import Ranker

#: What a search does before the first evaluation where no earlier process left machine code.
COMPILING = "compiling the planner's code, once per installation: half a minute of processor time, then the search"


def load_machine_code(problem: Problem, method: str, on_compiling: Callable[[], None] = lambda: None) -> None:
    """Price a candidate in every way that the search does: everything on the first GPU. No later price depends on it.

    Args:
        problem: what is going to be searched.
        method: by which method.
        on_compiling: called when something has to be compiled, before it is.
    """
    # Machine code is loaded when somebody searches, not when the package is imported.
    from plans.cost.compiled.jit import told_of_compiling

    with told_of_compiling(on_compiling), _no_garbage_collection():
        pricer = Pricer(problem.evaluator, Balancing())
        _price_plans(problem, pricer)
        _ALSO.get(method, lambda _pricer: None)(pricer)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Look for no garbage meanwhile: the compiler makes so many objects that it would take a good part of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _price_plans(problem: Problem, pricer: Pricer) -> None:
    layout, tasks = TaskLayout(1, 1, 1, (0,)), problem.workflow.tasks
    candidate = Genome((tasks,), ((0,),), dict.fromkeys(tasks, layout))
    pricer.price(candidate)
    pricer.evaluation(candidate)
    ranker = Ranker(problem, pricer)
    ranker.ranked(tasks[0], (0,), tasks[:1])
    ranker.guesses(tasks[0], (0,)).build(Recipe(0, 1, 1, False, Arrangement.REPLICA_BLOCKS))
    problem.evaluator.solve_rings()


def _price_tasks_alone(pricer: Pricer) -> None:
    task = pricer.evaluator.tasks[0]
    pricer.task_s(task, TaskLayout(1, 1, 1, (0,)))
    TaskRates(pricer.evaluator, task, 1).layers(np.zeros((1, 1, 1), dtype=np.int32), LayerSplit.SPEED)


def _price_parts(pricer: Pricer) -> None:
    evaluator, grid = pricer.evaluator, np.zeros((1, 1, 1), dtype=np.int32)
    task = evaluator.tasks[0]
    rates = TaskRates(evaluator, task, 1)
    layers = rates.layers(grid, LayerSplit.SPEED) or ()
    placement = CompactTask(grid, layers, share_samples(1, (1.0,)), 1)
    rates.resident_share(grid, layers)
    evaluator.task_s(task, placement)
    evaluator.replica_s(task, placement, 0, 1)
    evaluator.memory.group_memory((task,), {task: placement})


#: What methods price beside whole plans and rankings of layouts.
_ALSO = MappingProxyType({"ilp": _price_tasks_alone, "verl": _price_tasks_alone, "areal-hex": _price_parts})
