"""What every stage is given: the request, the run, the stores of the regions, phases, deadline and engines."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from pydantic import JsonValue

from plans.plan import Plan
from plans.spec.cluster import Machine
from plans.units import gbps_to_bytes_per_s
from stages.contract import StageRequest
from stages.engines.file_lock import exclusive
from stages.errors import ContractError
from stages.lease import StageLease
from stages.plan_history import NumberedPlan, numbered_plan
from stages.runs import ResolvedRun, load_run
from stages.spec.job import TrainingJob
from stages.timing import Clock, Deadline, PhaseTimer
from storage.runs import decided_plan
from storage.store import Store, open_store

if TYPE_CHECKING:  # only stages that use engines pay for the import
    from stages.engine_pool import EnginePool

logger = logging.getLogger("stages")

LEASE_MARGIN_S: Final = 300.0
"""Seconds that a lease outlasts the deadline of its stage: clocks of machines differ, and a stage takes time to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOutcome:
    """What a stage's function returns; becomes part of the `StageResult`."""

    reused: bool = False
    """True when committed artefacts were found and nothing was computed."""
    artefacts: Sequence[str] = ()
    """Keys of committed manifests or records."""
    metrics: dict[str, JsonValue] = field(default_factory=dict)
    """Small numbers for the iteration record."""


class StageContext:
    """One stage of one iteration at work."""

    def __init__(self, request: StageRequest, run: ResolvedRun, timer: PhaseTimer, deadline: Deadline) -> None:
        self.request = request
        self.run = run
        self.timer = timer
        self.deadline = deadline
        self._stores: dict[str, Store] = {}

    @property
    def job(self) -> TrainingJob:
        """The job."""
        return self.run.job

    @property
    def iteration(self) -> int:
        """Iteration k."""
        return self.request.iteration

    @property
    def clock(self) -> Clock:
        """Clock of the process."""
        return self.timer.clock

    @property
    def created_by(self) -> str:
        """Name that committed artefacts carry."""
        return f"{self.request.stage}@{self.request.machine}"

    @property
    def state_dir(self) -> Path:
        """Local directory of this machine's deployment."""
        return Path(self.request.state_dir)

    def machine_to_itself(self) -> AbstractContextManager[None]:
        """Wait until no other stage has this machine to itself, then have it.

        The tasks `prepare` and `profile` of iteration 0 start together; a measurement beside the warm-up would
        measure that.
        """
        self.state_dir.mkdir(parents=True, exist_ok=True)
        return exclusive(self.state_dir / "machine.lock", self.deadline.ends_at, f"machine {self.request.machine}")

    @cached_property
    def machine(self) -> Machine:
        """Machine on which the stage runs."""
        for machine in self.run.cluster.machines:
            if machine.name == self.request.machine:
                return machine
        known = ", ".join(m.name for m in self.run.cluster.machines)
        raise ContractError(
            f"request for run {self.run.name}: machine is {self.request.machine!r}, but the cluster has {known}; "
            "name one of them."
        )

    @property
    def store(self) -> Store:
        """Store of the region in which the stage runs."""
        return self.store_at(self.request.root)

    @property
    def home(self) -> Store:
        """Store of the home region: policies, resume points, plans and records."""
        return self.store_at(self.run.home_root)

    def store_of(self, region: str) -> Store:
        """Return the store of a region."""
        return self.store_at(self.run.roots[region])

    def store_at(self, root: str) -> Store:
        """Return the store at a root, opened once."""
        if root not in self._stores:
            store = open_store(root)
            is_far = root != self.request.root and store.local_path(self.run.name) is None
            self._stores[root] = self._far_store(store, root) if is_far else store
        return self._stores[root]

    def _far_store(self, store: Store, root: str) -> Store:
        """Return the store of another region behind the limit of the link to it, with this machine's cache in front."""
        from storage.range_cache import CachingStore
        from storage.rate_limit import RateLimitedStore, RateLimiter

        limit = transfer_limit(self.run, self.machine.region, root)
        found: object = store if limit is None else RateLimitedStore(store, RateLimiter(limit))
        # Stores by delegation, both.
        return cast("Store", CachingStore(cast("Store", found), self.state_dir / "cache" / "ranges"))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the stage."""
        return self.timer.phase(name)

    def log(self, message: str, **facts: object) -> None:
        """Log one line with the run, the iteration and facts."""
        text = message + "".join(f" {name}={value}" for name, value in facts.items())
        logger.info("run=%s iteration=%d stage=%s %s", self.run.name, self.iteration, self.request.stage, text)

    def param(self, name: str, allowed: Mapping[str, object] | Sequence[str]) -> str:
        """Return a text parameter of the request.

        Raises:
            ContractError: missing, or not one of `allowed`.
        """
        value = self.request.params.get(name)
        if not isinstance(value, str) or value not in allowed:
            raise ContractError(
                f"request of stage {self.request.stage}: params.{name} is {value!r}, but it is one of "
                f"{', '.join(allowed)}; add it."
            )
        return value

    @cached_property
    def numbered_plan(self) -> NumberedPlan:
        """Plan that this iteration uses.

        Raises:
            ContractError: the run has none yet.
        """
        number = decided_plan(self.home, self.run.name, self.iteration)
        if number is None:
            raise ContractError(
                f"run {self.run.name}: iteration {self.iteration} has no plan yet; run stage plan for it first."
            )
        return numbered_plan(self.home, self.run.name, number)

    @property
    def plan_number(self) -> int:
        """Number of the plan that this iteration uses."""
        return self.numbered_plan.number

    @property
    def plan(self) -> Plan:
        """Plan that this iteration uses."""
        return self.numbered_plan.plan

    @cached_property
    def engines(self) -> EnginePool:
        """Engines of this machine."""
        from stages.engine_pool import EnginePool

        return EnginePool(self)

    @property
    def rollout_lag(self) -> int:
        """Iterations by which sampling may run ahead of training, and a rollout wait for it."""
        return max(self.job.max_staleness, self.job.generate_ahead)

    @cached_property
    def lease(self) -> StageLease:
        """What this attempt reads and writes, safe from retention while it works."""
        request = self.request
        left_s = self.deadline.ends_at - self.clock.monotonic()
        return StageLease(
            self.home,
            self.run.name,
            holder=f"{request.stage}-{request.machine}-{request.iteration}",
            attempt=request.attempt,
            # Rollouts may wait in a buffer for a few iterations; evaluations are filed under version k + 1.
            iterations=range(max(0, request.iteration - self.rollout_lag), request.iteration + 2),
            folder=self.state_dir / "leases" / self.run.name,
            ends_at=self.clock.now() + left_s + LEASE_MARGIN_S,
        )

    def close(self) -> None:
        """Close connections and give the lease back; engines live on."""
        pool = self.__dict__.get("engines")
        if pool is not None:
            pool.close()
        if "lease" in self.__dict__:
            self.lease.release()


def transfer_limit(run: ResolvedRun, region: str, root: str) -> float | None:
    """Return the most that a stage process of a region moves to or from a store, bytes/s, None for no limit.

    A root that several regions share is as far as the widest of their links lets it be.
    """
    owners = [name for name, own in run.roots.items() if own == root and name != region]
    links = (run.cluster.links.region_pairs.get(frozenset((region, owner))) for owner in owners)
    limits = [None if link is None else link.transfer_gbps for link in links]
    given = [gbps_to_bytes_per_s(limit) for limit in limits if limit is not None]
    return max(given) if given and len(given) == len(limits) else None


def open_context(request: StageRequest, timer: PhaseTimer, deadline: Deadline) -> StageContext:
    """Return the context of a request, with the run read from its record.

    Raises:
        ContractError: no such run, or the request names another root or an iteration outside the run.
    """
    run = load_run(request.root, request.run)
    if request.iteration >= run.iterations:
        raise ContractError(
            f"request for run {run.name}: iteration is {request.iteration}, but the run has {run.iterations} "
            f"iterations (0 to {run.iterations - 1}); extend the run or ask for one of them."
        )
    return StageContext(request, run, timer, deadline)
