"""Tiny planning problems that brute force can solve, for the tests of exact search."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plans.cost.model import CostModel
from plans.cost.overlap import Objective
from plans.search.brute_force import JointSearch, brute_force
from plans.search.brute_force_walk import Best
from plans.search.budget import Budget, Meter
from plans.search.ilp.book import BoundBook
from plans.search.ilp.classes import make_columns
from plans.search.problem import Problem
from plans.search.run import SearchRun
from tests.helpers.planner_cases import paper_cluster, paper_job

SHAPE = {"layers": 5, "hidden": 2048, "intermediate": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128,
         "vocab": 20000, "tied": False}  # fmt: skip
Machines = Sequence[tuple[str, str, int]]


def tiny_problem(machines: Machines, *, algorithm: str = "grpo", mode: str = "sync", memory_scale: float = 0.3,
                 model: CostModel | None = None, prompts: int = 64, **sections: object) -> Problem:  # fmt: skip
    """Return a problem on machines of the paper's GPU types with scaled memory."""
    cluster = paper_cluster(list(machines), memory_scale=memory_scale)
    job = paper_job(SHAPE, algorithm=algorithm, mode=mode, prompts=prompts, responses=8, **sections)
    return Problem(cluster, job, model if model is not None else CostModel.paper())


def bounded_brute_force(problem: Problem, objective: Objective = Objective.PHASES) -> Best:
    """Return the optimum by enumeration that drops partial plans by the proved bounds."""
    book, search = BoundBook(problem), JointSearch(problem)
    seconds = {task: [c.seconds for c in make_columns(search, book, task)] for task in problem.workflow.tasks}
    least = {task: min(bounds, default=math.inf) for task, bounds in seconds.items()}
    return brute_force(problem, lower_s=least, generation_bound=book.generation_s, objective=objective)


def counted_run(evaluations: int = 200_000, seed: int = 0) -> SearchRun:
    """Return a run that is limited by evaluations only."""
    return SearchRun(meter=Meter(Budget(evaluations=evaluations)), seed=seed)
