"""Machine code before the budget: compiling takes a minute or more once, loading what was compiled about a second."""

from __future__ import annotations

from plans.search.balancing import Balancing
from plans.search.genome import Genome
from plans.search.layouts import TaskLayout
from plans.search.pricing import Pricer
from plans.search.problem import Problem
from plans.search.ranking import Ranker


def load_machine_code(problem: Problem) -> None:
    """Price a candidate in every way that searches do: everything on the first GPU. No later price depends on it."""
    pricer, layout = Pricer(problem.evaluator, Balancing()), TaskLayout(1, 1, 1, (0,))
    tasks = problem.workflow.tasks
    candidate = Genome((tasks,), ((0,),), dict.fromkeys(tasks, layout))
    pricer.price(candidate)
    pricer.evaluation(candidate)
    pricer.task_s(tasks[0], layout)
    Ranker(problem, pricer).ranked(tasks[0], (0,), tasks[:1])
