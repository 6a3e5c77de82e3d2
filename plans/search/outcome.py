"""From the incumbent of a search by candidates to the outcome that `make_plan` prices."""

from __future__ import annotations

from plans.cost.compact import plan_of
from plans.search.genome import Genome
from plans.search.problem import Problem
from plans.search.protocol import Outcome
from plans.search.run import Incumbent
from plans.search.tools import SearchTools


def outcome_of(problem: Problem, tools: SearchTools, incumbent: Incumbent[Genome], method: str) -> Outcome:
    """Return the outcome of a search: the incumbent as a plan document, None where there is none."""
    plan = None
    if incumbent.best is not None:
        compact, evaluation = tools.pricer.compact(incumbent.best), tools.pricer.evaluation(incumbent.best)
        if compact is not None and evaluation is not None:
            plan = plan_of(
                compact, problem.cluster, problem.job, method=method, decode_batches=evaluation.decode_batches
            )
    return Outcome(plan=plan, trace=tuple(incumbent.trace), termination=incumbent.run.meter.termination)
