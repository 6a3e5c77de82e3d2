"""Which machines to rent and how to use them (AReaL-Hex's budget view: equal money, or equal throughput).

Sets of whole machines are ranked by an optimistic estimate, and the planner places the job on the best of them until
the estimates of the rest fall behind what was found, or enough were planned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plans.cost.model import CostModel
from plans.errors import InfeasibleError, NoIncumbentError, SearchError
from plans.feasibility import find_fitting_plan
from plans.memory import TaskMemory
from plans.renting.estimate import offer_rates
from plans.renting.offers import OfferList
from plans.search.budget import Budget, Clock
from plans.search.planner import PlanResult, make_plan
from plans.search.protocol import Planner
from plans.spec.job import Job, Mode
from plans.workflow import RlTask, shape_of, workflow_of

IntArray = NDArray[np.int64]

#: Sets of machines that are looked at; a longer price list is refused.
MOST_SETS = 500_000
#: Sets whose memory is tried when the budget buys nothing.
MOST_FITS = 400
#: Share of the estimate that later sets are trusted to reach, relative to the best share seen so far.
TRUST = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSet:
    """A set of machines that the planner placed the job on."""

    counts: tuple[int, ...]
    """Machines of each offer, in the order of the list."""
    usd_per_hour: float
    """Price by the list."""
    throughput_samples_s: float | None
    """Samples per second of its plan; None where no plan was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """What to rent, and the plan on it."""

    counts: tuple[int, ...]
    """Machines of each offer, in the order of the list."""
    description: str
    """The same in words."""
    usd_per_hour: float
    """Price by the list, idle GPUs included."""
    result: PlanResult
    """The plan on the rented cluster; its `plan.cluster` is that cluster's fingerprint."""
    considered: tuple[PlannedSet, ...]
    """Sets that the planner placed the job on, in that order; the rented one is among them."""

    @property
    def throughput_samples_s(self) -> float:
        """Samples per second of the plan."""
        return self.result.report.throughput_samples_s

    @property
    def usd_per_million_samples(self) -> float:
        """Money per million samples."""
        return self.usd_per_hour / 3600.0 / self.throughput_samples_s * 1e6


class NothingAffordableError(InfeasibleError):
    """A budget that buys no machines on which the job fits, or none on which a plan was found.

    Attributes:
        least_usd_per_hour: the least that would do; None where nothing that is offered would.
    """

    def __init__(self, message: str, least_usd_per_hour: float | None) -> None:
        """Keep the least budget beside the message."""
        self.least_usd_per_hour = least_usd_per_hour
        super().__init__(message)


class ThroughputOutOfReachError(InfeasibleError):
    """No set of the offered machines was found to reach the throughput."""


class Chooser:
    """Plans sets of machines of one price list for one job."""

    def __init__(
        self,
        offers: OfferList,
        job: Job,
        model: CostModel,
        method: str | Planner,
        budget: Budget,
        clock: Clock | None,
        on_planned: Callable[[PlannedSet], None] | None,
    ) -> None:
        """Tabulate every set with its price and estimate."""
        self._on_planned = on_planned
        self.offers, self.job, self._model = offers, job, model
        self._method, self._budget, self._clock = method, budget, clock
        self.counts: IntArray = _every_set(offers)
        prices = np.array([offer.machine_usd_per_hour for offer in offers.offers])
        self.usd: NDArray[np.float64] = self.counts @ prices
        self.estimates = offer_rates(offers, job, model).throughput(self.counts)
        self.considered: list[PlannedSet] = []

    @property
    def planned(self) -> int:
        """Sets that the planner placed the job on so far."""
        return len(self.considered)

    def plan(self, row: int) -> Rental | None:
        """Return the rental of a set; None where the job does not fit or no plan was found."""
        counts = tuple(self.counts[row].tolist())
        cluster = self.offers.cluster(counts)
        if find_fitting_plan(cluster, self.job) is None:
            return None
        try:
            result = make_plan(cluster, self.job, self._method, self._model, self._budget, clock=self._clock)
        except (InfeasibleError, NoIncumbentError):
            self._note(row, None)
            return None
        self._note(row, result.report.throughput_samples_s)
        return Rental(
            counts=counts,
            description=self.offers.describe(counts),
            usd_per_hour=float(self.usd[row]),
            result=result,
            considered=tuple(self.considered),
        )

    def _note(self, row: int, reached: float | None) -> None:
        counts = tuple(self.counts[row].tolist())
        self.considered.append(
            PlannedSet(counts=counts, usd_per_hour=float(self.usd[row]), throughput_samples_s=reached)
        )
        if self._on_planned is not None:
            self._on_planned(self.considered[-1])

    def may_hold(self) -> NDArray[np.bool_]:
        """Return which sets have memory for all models when nothing is held twice; no other set holds the job."""
        memory = np.array(
            [
                offer.gpus_per_machine * self.offers.cluster(_one(index, len(self.offers.offers))).view.memory_bytes[0]
                for index, offer in enumerate(self.offers.offers)
            ]
        )
        enough: NDArray[np.bool_] = self.counts @ memory >= _least_bytes(self.job)
        return enough

    def least_that_fits(self) -> tuple[float, str] | None:
        """Return the price and the words of the cheapest set that holds the job; None where none was found."""
        enough = np.flatnonzero(self.may_hold())
        for row in enough[np.argsort(self.usd[enough], kind="stable")][:MOST_FITS].tolist():
            counts = self.counts[row].tolist()
            if find_fitting_plan(self.offers.cluster(counts), self.job) is not None:
                return float(self.usd[row]), self.offers.describe(counts)
        return None


def rent_within_budget(
    offers: OfferList,
    job: Job,
    usd_per_hour: float,
    model: CostModel | None = None,
    *,
    method: str | Planner | None = None,
    budget: Budget | None = None,
    most_plans: int = 12,
    clock: Clock | None = None,
    on_planned: Callable[[PlannedSet], None] | None = None,
) -> Rental:
    """Return the machines with the most throughput that a budget buys, with the plan on them.

    Args:
        offers: the price list.
        job: the job.
        usd_per_hour: the budget.
        model: cost model; absent = calibrated.
        method: planner's method; absent = `areal-hex` for async jobs, the default one for sync jobs.
        budget: limit of each plan's search; absent = 300 evaluations.
        most_plans: sets on which the job is planned.
        clock: monotonic seconds, for a search budget in seconds.
        on_planned: told of each set when the planner is done with it.

    Raises:
        NothingAffordableError: the job fits nothing that the budget buys; the error says the least that would do.
        SearchError: the budget is not positive, or the list has too many sets.
    """
    _check_positive("budget", usd_per_hour, "$/h")
    chooser = _chooser(offers, job, model, method, budget, clock, on_planned)
    best: Rental | None = None
    for row in _best_estimate_first(chooser, usd_per_hour):
        estimate = float(chooser.estimates[row])
        if chooser.planned >= most_plans or (best is not None and estimate <= best.throughput_samples_s):
            break
        rental = chooser.plan(row)
        if rental is not None and (best is None or rental.throughput_samples_s > best.throughput_samples_s):
            best = rental
    if best is None:
        raise _nothing_affordable(chooser, usd_per_hour)
    return replace(best, considered=tuple(chooser.considered))


def rent_for_throughput(
    offers: OfferList,
    job: Job,
    samples_per_s: float,
    model: CostModel | None = None,
    *,
    method: str | Planner | None = None,
    budget: Budget | None = None,
    most_plans: int = 40,
    clock: Clock | None = None,
    on_planned: Callable[[PlannedSet], None] | None = None,
) -> Rental:
    """Return the cheapest machines found on which a plan reaches a throughput.

    Sets are planned in the order of their price. One is skipped when its estimate, times the best share of an
    estimate that any plan has reached so far (and a tenth), stays below the throughput.

    Raises:
        ThroughputOutOfReachError: no planned set reaches it; the error names the fastest.
        SearchError: the throughput is not positive, or the list has too many sets.
    """
    _check_positive("throughput", samples_per_s, "samples/s")
    chooser = _chooser(offers, job, model, method, budget, clock, on_planned)
    fastest: Rental | None = None
    share = math.inf
    for row in np.lexsort((np.arange(len(chooser.usd)), -chooser.estimates, chooser.usd)).tolist():
        estimate = float(chooser.estimates[row])
        if estimate < samples_per_s or (math.isfinite(share) and estimate * share * TRUST < samples_per_s):
            continue
        if chooser.planned >= most_plans:
            break
        rental = chooser.plan(row)
        if rental is None:
            continue
        reached = rental.throughput_samples_s
        if reached >= samples_per_s:
            return rental
        share = reached / estimate if math.isinf(share) else max(share, reached / estimate)
        if fastest is None or reached > fastest.throughput_samples_s:
            fastest = rental
    raise _out_of_reach(chooser, samples_per_s, fastest)


def _chooser(
    offers: OfferList,
    job: Job,
    model: CostModel | None,
    method: str | Planner | None,
    budget: Budget | None,
    clock: Clock | None,
    on_planned: Callable[[PlannedSet], None] | None,
) -> Chooser:
    chosen = method if method is not None else ("areal-hex" if job.mode is Mode.ASYNC else "sha-ea")
    limit = budget if budget is not None else Budget(evaluations=300)
    return Chooser(
        offers, job, model if model is not None else CostModel.calibrated(), chosen, limit, clock, on_planned
    )


def _every_set(offers: OfferList) -> IntArray:
    number = math.prod(offer.machines + 1 for offer in offers.offers)
    if number > MOST_SETS:
        raise SearchError(
            f"The price list {offers.name} allows {number} sets of machines, but at most {MOST_SETS} are looked at; "
            "offer fewer machines, or fewer kinds at a time."
        )
    rows = itertools.product(*(range(offer.machines + 1) for offer in offers.offers))
    return np.array([row for row in rows if any(row)], dtype=np.int64)


def _best_estimate_first(chooser: Chooser, usd_per_hour: float) -> list[int]:
    """Return the sets that a budget buys: best estimate first, among equals the cheapest, then the first.

    Sets with an estimate of 0 come last, and only those with the memory that the job needs: a replica may span machines
    of several offers, which the estimate does not see.
    """
    rows = np.flatnonzero(chooser.usd <= usd_per_hour * (1 + 1e-12))
    rows = rows[np.lexsort((rows, chooser.usd[rows], -chooser.estimates[rows]))]
    unknown = rows[(chooser.estimates[rows] == 0.0) & chooser.may_hold()[rows]]
    return [*rows[chooser.estimates[rows] > 0.0].tolist(), *unknown[:MOST_FITS].tolist()]


def _one(index: int, length: int) -> list[int]:
    return [int(i == index) for i in range(length)]


def _least_bytes(job: Job) -> float:
    """Return the bytes of all models with nothing held twice: no set with less memory can hold the job."""
    total = 0.0
    for task in workflow_of(job).tasks:
        if task is RlTask.CRITIC_INFERENCE or (job.mode is Mode.SYNC and task is RlTask.ACTOR_GENERATION):
            continue  # may use the weights of training in place
        memory = TaskMemory(job, task)
        total += memory.model_bytes(shape_of(job, task).layers, is_first=True, is_last=True, tp=1, dp=1)
    return total


def _check_positive(what: str, value: float, unit: str) -> None:
    if not math.isfinite(value) or value <= 0:
        raise SearchError(f"The {what} is {value} {unit}, but it is a positive number; give a finite one above 0.")


def _nothing_affordable(chooser: Chooser, usd_per_hour: float) -> NothingAffordableError:
    least = chooser.least_that_fits()
    if least is not None and least[0] <= usd_per_hour:
        return NothingAffordableError(
            f"Job {chooser.job.name} fits {least[1]} for {least[0]:.2f} $/h, but no plan was found on the "
            f"{chooser.planned} sets of machines tried within {usd_per_hour:.2f} $/h; give each search a larger budget "
            "or plan more sets.",
            least[0],
        )
    if least is None:
        remedy, least_usd = (
            "and no set of the offered machines that was tried does; offer more or larger machines",
            None,
        )
    else:
        remedy, least_usd = f"the least that would do is {least[0]:.2f} $/h for {least[1]}", least[0]
    return NothingAffordableError(
        f"A budget of {usd_per_hour:.2f} $/h buys nothing on which job {chooser.job.name} fits; {remedy}.", least_usd
    )


def _out_of_reach(chooser: Chooser, samples_per_s: float, fastest: Rental | None) -> ThroughputOutOfReachError:
    most = float(chooser.estimates.max())
    if fastest is None:
        reason = (
            f"even an optimistic estimate gives at most {most:.3g}" if most < samples_per_s else "no set holds the job"
        )
        found = reason
    else:
        found = (
            f"the fastest of the {chooser.planned} sets planned reaches {fastest.throughput_samples_s:.3g} samples/s "
            f"for {fastest.usd_per_hour:.2f} $/h ({fastest.description})"
        )
    return ThroughputOutOfReachError(
        f"No offered set was found to reach {samples_per_s:.3g} samples/s: {found}; lower the throughput or offer more."
    )
