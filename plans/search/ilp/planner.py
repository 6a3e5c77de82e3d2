"""Method `ilp`: proves the cheapest plan, or says how far from proved it is.

1. `sha-ea` makes a first plan; its seconds cut off everything dearer.
2. Per task, classes of placements (degrees, GPUs per machine) get lower bounds (`bounds`). A class whose bound,
   with the least of all other tasks, exceeds the best plan is dropped: no better plan can use it.
3. The grouping is branched on. Per grouping an integer program (`master`) picks a class per task; as all its
   coefficients are lower bounds, its optimum bounds every plan of the grouping.
4. The grouping with the least bound is worked on: the classes picked are tightened, generation's intervals split,
   and at last the plans in the choice are enumerated against the best plan (`closing`), which improves it or
   refutes the choice. Then the program is solved again.
5. It ends when no grouping's bound is below the best plan by more than the tolerance: optimal. Otherwise the least
   bound is the proved one.

Only 2 and 4 drop plans, each by a proof, so the answer is exact for the plan space of `plans.search.brute_force`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from plans.cost.compact import compact_of, plan_of
from plans.cost.overlap import Objective, free_overlap_s
from plans.feasibility import infeasible_error
from plans.plan import Plan
from plans.search.brute_force_walk import Best
from plans.search.budget import Budget, Meter
from plans.search.genome import Genome
from plans.search.ilp.classes import TooManyClassesError
from plans.search.ilp.closing import PART_STEPS
from plans.search.ilp.proof import Proof
from plans.search.problem import Problem
from plans.search.protocol import Outcome, Planner
from plans.search.run import Incumbent, SearchRun
from plans.search.solver_status import SolveStatus, Termination, search_status

#: Relative gap at which a plan counts as proved optimal.
TOLERANCE = 1e-6
#: Share of the budget for the first plan, and the most seconds of it.
WARM_SHARE, WARM_SECONDS = 0.2, 10.0


@dataclass(frozen=True)
class IlpPlanner:
    """The exact method."""

    name: ClassVar[str] = "ilp"
    solver: str = "highs"
    """`highs` or `cbc`; the other one is the fallback."""
    tolerance: float = TOLERANCE
    """Relative gap at which a plan counts as optimal."""
    warm_method: str | None = "sha-ea"
    """Method that makes the first plan; None = none."""
    part_steps: int = PART_STEPS
    """Steps of an enumeration that is to refute more than one choice of classes; 0 = leave all to the program."""

    objective: Objective = Objective.PHASES
    """Seconds that are minimised and that the bound is about: `iteration_s` or `free_overlap_s`."""

    def search(self, problem: Problem, run: SearchRun) -> Outcome:
        """Return the proved plan, or the best one with the bound reached."""
        incumbent: Incumbent[Plan] = Incumbent(run, phase="first plan")
        self._first_plan(problem, run, incumbent)
        best = Best(incumbent.best_s)
        incumbent.phase = "proof"

        def keep() -> None:
            if best.score_s < incumbent.best_s and best.genome is not None:
                incumbent.offer(best.score_s, self._plan(problem, proof, best.genome))
            incumbent.report()

        try:
            proof = Proof(
                problem,
                run.meter,
                best,
                solver=self.solver,
                tolerance=self.tolerance,
                part_steps=self.part_steps,
                objective=self.objective,
                on_step=keep,
            )
        except TooManyClassesError:
            return self._outcome(problem, run, incumbent, -math.inf)
        bound_s = proof.run()
        keep()
        return self._outcome(problem, run, incumbent, bound_s)

    def _first_plan(self, problem: Problem, run: SearchRun, incumbent: Incumbent[Plan]) -> None:
        from plans.search.planner import find_planner  # the registry imports this module by name

        plan = run.warm_start
        trace: tuple[tuple[float, int, float], ...] = ()
        if self.warm_method is not None:
            planner: Planner = find_planner(self.warm_method, problem.job)
            meter = Meter(_warm_budget(run.meter.budget), run.meter.clock, lambda: run.meter.is_stopped)
            begin = run.meter.elapsed_s
            inner = SearchRun(meter=meter, seed=run.seed, workers=run.workers, warm_start=plan)
            outcome = planner.search(problem, inner)
            run.meter.spend_at_most(meter.evaluations)
            trace = tuple((begin + seconds, count, best_s) for seconds, count, best_s in outcome.trace)
            plan = outcome.plan if outcome.plan is not None else plan
        score_s = math.inf if plan is None else _score_s(problem, plan, self.objective)
        if plan is not None and score_s < math.inf:
            incumbent.offer(score_s, plan)
        incumbent.trace[:0] = [entry for entry in trace if entry[2] > score_s]

    def _plan(self, problem: Problem, proof: Proof, genome: Genome) -> Plan:
        compact, evaluation = proof.search.pricer.compact(genome), proof.search.pricer.evaluation(genome)
        if compact is None or evaluation is None:
            raise ValueError("the best candidate has no placement, though it has a price")
        return plan_of(
            compact, problem.cluster, problem.job, method=self.name, decode_batches=evaluation.decode_batches
        )

    def _outcome(self, problem: Problem, run: SearchRun, incumbent: Incumbent[Plan], bound_s: float) -> Outcome:
        status = search_status(incumbent.best_s, bound_s, tolerance=self.tolerance * (1.0 + 1e-6))
        infeasible = None
        if status is SolveStatus.INFEASIBLE:
            reason = infeasible_error(problem.cluster, problem.job)
            infeasible = f"{reason} No plan of any grouping, degrees and placement fits (proved)."
        is_proved = status in {SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE}
        termination = Termination.COMPLETE if is_proved else Termination(run.meter.termination)
        if termination is Termination.COMPLETE and not is_proved:
            termination = Termination.SIZE
        return Outcome(
            plan=incumbent.best,
            trace=tuple(incumbent.trace),
            optimal=status is SolveStatus.OPTIMAL,
            bound_s=bound_s if math.isfinite(bound_s) else None,
            status=status.value,
            termination=termination.value,
            infeasible=infeasible,
        )


def _warm_budget(budget: Budget) -> Budget:
    if budget.evaluations is not None:
        return Budget(evaluations=max(1, int(budget.evaluations * WARM_SHARE)))
    return Budget(seconds=min(WARM_SECONDS, (budget.seconds or WARM_SECONDS) * WARM_SHARE))


def _score_s(problem: Problem, plan: Plan, objective: Objective) -> float:
    try:
        compact = compact_of(plan, problem.cluster)
    except ValueError:
        return math.inf  # replicas of unlike shape: outside the plan space; the caller still compares with it
    evaluation = problem.evaluator.evaluate(compact)
    if objective is Objective.PHASES or not evaluation.feasible:
        return evaluation.score_s
    gpus = {task: frozenset(placement.flat.tolist()) for task, placement in compact.tasks.items()}
    return free_overlap_s(problem.job.mode, evaluation.task_s, gpus, evaluation.phases.transfer_s)
