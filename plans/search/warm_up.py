"""Machine code before the budget: compiling takes a minute or more once, loading what was compiled about a second."""

from __future__ import annotations

from collections.abc import Callable

from plans.search.balancing import Balancing
from plans.search.genome import Genome
from plans.search.layouts import Arrangement, Recipe, TaskLayout
from plans.search.pricing import Pricer
from plans.search.problem import Problem
from plans.search.ranking import Ranker

#: What a search does before the first evaluation where no earlier process left machine code.
COMPILING = (
    "compiling the planner's machine code, once per installation: about 1.5 minutes of processor time, then the search"
)


def load_machine_code(problem: Problem, on_compiling: Callable[[], None] = lambda: None) -> None:
    """Price a candidate in every way that searches do: everything on the first GPU. No later price depends on it.

    Args:
        problem: what is going to be searched.
        on_compiling: called when something has to be compiled, before it is.
    """
    # Machine code is loaded when somebody searches, not when the package is imported.
    from plans.cost.compiled.jit import told_of_compiling

    with told_of_compiling(on_compiling):
        _price_everything(problem)


def _price_everything(problem: Problem) -> None:
    pricer, layout = Pricer(problem.evaluator, Balancing()), TaskLayout(1, 1, 1, (0,))
    tasks = problem.workflow.tasks
    candidate = Genome((tasks,), ((0,),), dict.fromkeys(tasks, layout))
    pricer.price(candidate)
    pricer.evaluation(candidate)
    pricer.task_s(tasks[0], layout)
    ranker = Ranker(problem, pricer)
    ranker.ranked(tasks[0], (0,), tasks[:1])
    ranker.guesses(tasks[0], (0,)).build(Recipe(0, 1, 1, False, Arrangement.REPLICA_BLOCKS))
