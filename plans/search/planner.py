"""`make_plan`: the planner's front door, and the registry of methods."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import cast

from plans.cost.model import CostModel
from plans.cost.price import price
from plans.cost.report import CostReport
from plans.errors import InfeasibleError, NoIncumbentError, PlanningError, SearchError
from plans.feasibility import find_fitting_plan, infeasible_error
from plans.plan import Plan, SearchRecord, check_plan
from plans.search.budget import Budget, Clock, Meter, StopCheck
from plans.search.limits import NO_LIMITS, Limits
from plans.search.problem import Problem
from plans.search.protocol import Outcome, Planner
from plans.search.run import Progress, ProgressCallback, SearchRun
from plans.search.warm_up import COMPILING, load_machine_code
from plans.spec.cluster import Cluster
from plans.spec.job import Job, Mode

DEFAULT_METHOD = "sha-ea"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodEntry:
    """A registered method."""

    module: str
    """Module that holds it; imported on first use, so heavy libraries load only when asked for."""
    factory: str
    """Class or function without arguments that makes the planner."""
    summary: str
    """One line for help texts."""
    is_async_only: bool = False
    """Whether it plans asynchronous jobs only."""


#: Every method by name.
METHODS: MappingProxyType[str, MethodEntry] = MappingProxyType(
    {
        "sha-ea": MethodEntry(
            module="plans.search.sha_ea",
            factory="ShaEaPlanner",
            summary="HetRL: nested halving and evolution (default)",
        ),
        "ilp": MethodEntry(
            module="plans.search.ilp.planner",
            factory="IlpPlanner",
            summary="integer program with proof (small clusters)",
        ),
        "verl": MethodEntry(
            module="plans.search.verl", factory="VerlPlanner", summary="verl's mapping, blind to GPU identity"
        ),
        "streamrl": MethodEntry(
            module="plans.search.streamrl",
            factory="StreamRlPlanner",
            summary="StreamRL's two homogeneous groups",
            is_async_only=True,
        ),
        "areal-hex": MethodEntry(
            module="plans.search.areal_hex.planner",
            factory="ArealHexPlanner",
            summary="AReaL-Hex: training and rollout plans by turns over splits of the GPUs",
            is_async_only=True,
        ),
        "deap": MethodEntry(
            module="plans.search.deap_ea", factory="DeapPlanner", summary="standard evolutionary algorithm on DEAP"
        ),
        "random": MethodEntry(
            module="plans.search.random_search", factory="RandomPlanner", summary="uniform random placements"
        ),
    }
)


class MethodError(SearchError):
    """A method that does not exist or does not plan this kind of job."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan with its price and how it was found."""

    plan: Plan
    """The placement, with `predicted` and `search` filled."""
    report: CostReport
    """Its price."""

    @property
    def search(self) -> SearchRecord:
        """How it was found."""
        return self.plan.search

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration."""
        return cast("float", self.report.iteration_s)  # a returned plan is feasible, so it has a time


def find_planner(method: str, job: Job) -> Planner:
    """Return the planner of a method.

    Raises:
        MethodError: the method is unknown, or plans asynchronous jobs only and the job is synchronous.
    """
    entry = METHODS.get(method)
    if entry is None:
        raise MethodError(f"Method {method!r} is unknown; use one of {', '.join(METHODS)}.")
    if entry.is_async_only and job.mode is not Mode.ASYNC:
        raise MethodError(
            f"Method {method} plans asynchronous jobs only, but the mode of job {job.name} is {job.mode.value}; "
            f"set mode: async and max_staleness: 1 or more, or use another method, such as {DEFAULT_METHOD}."
        )
    return cast("Planner", getattr(import_module(entry.module), entry.factory)())


def make_plan(
    cluster: Cluster,
    job: Job,
    method: str | Planner = DEFAULT_METHOD,
    model: CostModel | None = None,
    budget: Budget | None = None,
    seed: int = 0,
    workers: int = 1,
    clock: Clock | None = None,
    on_progress: ProgressCallback | None = None,
    should_stop: StopCheck | None = None,
    warm_start: Plan | None = None,
    limits: Limits = NO_LIMITS,
) -> PlanResult:
    """Search a placement.

    Args:
        cluster: the cluster.
        job: the job.
        method: a registered name, or a planner with settings of its own.
        model: cost model; absent = calibrated with built-in coefficients.
        budget: limit; absent = 20,000 evaluations.
        seed: seed; the same seed and number of evaluations give the same plan, whatever the workers.
        workers: processes.
        clock: monotonic seconds; needed for a budget in seconds, otherwise only recorded.
        on_progress: called with the state of the search.
        should_stop: asked between evaluations; True returns the best plan so far.
        warm_start: a plan to start from; the result is never worse.
        limits: what the engines cannot execute; no plan that breaks a limit is returned.

    Raises:
        MethodError: the method is unknown or does not plan this job.
        PlanMismatchError: the warm start belongs to another cluster or job.
        SpecError: the warm start breaks a rule.
        InfeasibleError: no placement can exist.
        NoIncumbentError: none was found within the budget.
    """
    planner = find_planner(method, job) if isinstance(method, str) else method
    if warm_start is not None:
        check_plan(warm_start, cluster, job, source_name="warm start")
    chosen = model if model is not None else CostModel.calibrated()
    problem = Problem(cluster, job, chosen, limits)
    if (
        problem.least_gpus(problem.workflow.tasks) > problem.view.num_gpus
        or problem.view.num_gpus < problem.least_groups
    ):
        raise infeasible_error(cluster, job)
    load_machine_code(problem, planner.name, partial(_tell_of_compiling, on_progress))
    meter = Meter(budget if budget is not None else Budget(evaluations=20_000), clock, should_stop)
    run = SearchRun(meter=meter, seed=seed, workers=workers, on_progress=on_progress, warm_start=warm_start)
    outcome = planner.search(problem, run)
    return _result(problem, run, outcome, planner.name)


def _tell_of_compiling(on_progress: ProgressCallback | None) -> None:
    if on_progress is not None:
        on_progress(Progress(phase=COMPILING, elapsed_s=0.0, evaluations=0, best_iteration_s=math.inf, fraction=0.0))


def _result(problem: Problem, run: SearchRun, outcome: Outcome, method: str) -> PlanResult:
    candidates = [
        plan
        for plan in (outcome.plan, run.warm_start)
        if plan is not None and not problem.limits.faults(plan, problem.view)
    ]
    priced = [(price(problem.cluster, problem.job, plan, problem.model), plan) for plan in candidates]
    feasible = [(report, plan) for report, plan in priced if report.feasible and report.iteration_s is not None]
    if not feasible:
        raise _nothing_found(problem, run, outcome, method)
    report, plan = min(feasible, key=lambda pair: cast("float", pair[0].iteration_s))
    meter = run.meter
    record = SearchRecord(
        evaluations=meter.evaluations,
        wall_s=meter.elapsed_s,
        seed=run.seed,
        optimal=outcome.optimal,
        bound_s=outcome.bound_s,
        trace=outcome.trace,
        status=outcome.status,
        termination=outcome.termination,
    ).model_copy(update=dict(outcome.facts))
    filled = plan.model_copy(update={"method": method, "predicted": report.to_document(), "search": record})
    return PlanResult(filled, report)


def _nothing_found(problem: Problem, run: SearchRun, outcome: Outcome, method: str) -> PlanningError:
    if outcome.infeasible is not None:
        return InfeasibleError(outcome.infeasible)
    if find_fitting_plan(problem.cluster, problem.job) is None:
        return infeasible_error(problem.cluster, problem.job)
    meter = run.meter
    within = f" within the limits of the engines ({problem.limits.sentence()})" if problem.limits else ""
    return NoIncumbentError(
        f"Method {method} found no feasible plan{within} in {meter.evaluations} evaluations and {meter.elapsed_s:.1f} s"
        f" (ended by: {outcome.termination or meter.termination}); raise the budget, or use another method."
    )
