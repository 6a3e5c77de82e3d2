"""Placement of a job: the one call through which a plan is chosen.

One machine: a rule (`stages.single_machine_plan`). Several: the planner's default search, within the limits of the
engines, on the calibrated model with the measured rates. How a plan was found stands in its search record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from plans.cost import price
from plans.cost.fan_out import fan_outs
from plans.errors import InfeasibleError, NoIncumbentError, TooFewGpusError
from plans.plan import Plan
from plans.search.budget import Budget
from plans.search.flip_roles import FlipRolesPlanner, SideFactors
from plans.search.planner import DEFAULT_METHOD, make_plan
from plans.search.run import ProgressCallback
from plans.spec.cluster import Cluster
from stages.engine_limits import engine_limits
from stages.measured_rates import Profiles, model_of
from stages.single_machine_plan import plan_on_machine
from stages.spec.job import TrainingJob

EVALUATIONS: Final = 1000
"""Budget of a search inside a run. Counted, not timed: equal inputs give equal plans on any machine."""


FLIPS: Final = 200
"""Flips of roles that are priced at most."""


@dataclass(frozen=True, slots=True)
class Flipped:
    """A plan with other roles, and what both plans take by the measured rates."""

    plan: Plan
    """The plan."""
    before_s: float
    """Seconds of an iteration under the plan in force."""
    after_s: float
    """Seconds of an iteration under the new one."""


def choose_plan(
    cluster: Cluster,
    job: TrainingJob,
    *,
    profiles: Profiles,
    seed: int,
    drained: Sequence[str] = (),
    standing: Plan | None = None,
    on_progress: ProgressCallback | None = None,
) -> Plan:
    """Return the plan for a job on a cluster; equal arguments give an equal plan.

    Args:
        cluster: The machines.
        job: The job.
        profiles: Measurements by machine name (empty: none yet).
        seed: Seed of the search.
        drained: Machines that get no work.
        standing: The plan in force, from which the search starts; one of another cluster, job or of drained machines
            is left out.
        on_progress: Called with the state of the search, where there is one.

    Raises:
        InfeasibleError: the job does not fit the machines.
        NoIncumbentError: the search found no placement that the engines can run.
    """
    usable = _without(cluster, drained)
    model = model_of(cluster, job.planner, profiles)
    facts: dict[str, JsonValue] = {
        "model": f"{model.mode.value}: {model.calibration.name}",
        "drained": [*drained],
    }
    limits = engine_limits(job, cluster)
    if len(usable.machines) == 1:
        plan = plan_on_machine(cluster, job.planner, usable.machines[0], model, limits)
    else:
        is_kept = standing is not None and (standing.cluster, standing.job) == (
            cluster.fingerprint, job.planner.fingerprint,
        ) and not _machines_of(standing) & set(drained)  # fmt: skip
        warm_start = standing.model_copy(update={"cluster": usable.fingerprint}) if standing and is_kept else None
        found = make_plan(
            usable, job.planner, DEFAULT_METHOD, model=model, budget=Budget(evaluations=EVALUATIONS), seed=seed,
            warm_start=warm_start, limits=limits, on_progress=on_progress,
        ).plan  # fmt: skip
        plan = found.model_copy(update={"cluster": cluster.fingerprint})
        plan = plan.model_copy(update={"predicted": price(cluster, job.planner, plan, model).to_document()})
        facts |= {"budget": f"{EVALUATIONS}evals", "limits": limits.sentence()}
    search = type(plan.search).model_validate({**plan.search.model_dump(), **facts})
    return plan.model_copy(update={"search": search, "fan_out": fan_outs(cluster, job.planner, plan, model)})


def flip_roles(
    cluster: Cluster,
    job: TrainingJob,
    *,
    standing: Plan,
    factors: SideFactors,
    profiles: Profiles,
    seed: int,
    drained: Sequence[str] = (),
) -> Flipped | None:
    """Return the best plan one flip of roles away from the one in force; None where no flip can run.

    Args:
        cluster: The machines.
        job: The job.
        standing: The plan in force, of this cluster and job and without drained machines.
        factors: Measured over promised seconds of both sides under that plan.
        profiles: Measurements by machine name.
        seed: Seed of the search.
        drained: Machines that get no work.
    """
    usable = _without(cluster, drained)
    model, limits = model_of(cluster, job.planner, profiles), engine_limits(job, cluster)
    planner = FlipRolesPlanner(standing=standing, factors=factors)
    try:
        found = make_plan(
            usable, job.planner, planner, model=model, budget=Budget(evaluations=FLIPS), seed=seed, limits=limits
        ).plan
    except (InfeasibleError, NoIncumbentError):
        return None
    plan = found.model_copy(update={"cluster": cluster.fingerprint})
    before, after = (price(cluster, job.planner, each, model) for each in (standing, plan))
    if before.phases is None or after.phases is None:
        return None
    facts: dict[str, JsonValue] = {
        "model": f"{model.mode.value}: {model.calibration.name}",
        "drained": [*drained],
        "limits": limits.sentence(),
        "factors": {"producer": factors.producer, "consumer": factors.consumer},
    }
    search = type(plan.search).model_validate({**plan.search.model_dump(), **facts})
    fan_out = fan_outs(cluster, job.planner, plan, model)
    plan = plan.model_copy(update={"predicted": after.to_document(), "search": search, "fan_out": fan_out})
    return Flipped(plan, factors.iteration_s(before.phases), factors.iteration_s(after.phases))


def _without(cluster: Cluster, drained: Sequence[str]) -> Cluster:
    machines = tuple(machine for machine in cluster.machines if machine.name not in set(drained))
    if not machines:
        raise TooFewGpusError(
            f"cluster {cluster.name}: every machine is drained ({', '.join(drained)}), so nothing can be placed; take "
            "one back with `motley drain --undo`."
        )
    if len(machines) == len(cluster.machines):
        return cluster
    return Cluster(
        name=cluster.name, gpu_types=cluster.gpu_types, machines=machines, links=cluster.links, storage=cluster.storage
    )


def _machines_of(plan: Plan) -> set[str]:
    return {gpu.rpartition("/")[0] for placed in plan.tasks.values() for gpu in placed.gpus}
