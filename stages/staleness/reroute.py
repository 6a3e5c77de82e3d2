"""The cheapest change of a plan: deal the same shards to the same replicas in other proportions.

No engine is started, no weights are moved. The other changes (another role for a device, another placement) are
searches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plans.balance import proportional_shares
from plans.plan import Plan, TaskPlan
from plans.workflow import RlTask
from storage.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Rerouted:
    """A plan with other shares, and what they promise."""

    plan: Plan
    """The plan; equal to the old one but for the generation replicas' samples."""
    gain: float
    """Relative gain of generation time: old makespan / new makespan - 1, >= 0."""


def replica_rates(shards: Sequence[Manifest]) -> dict[int, float]:
    """Return completions per second of each replica, from the engine calls in which an iteration's shards were made.

    Replicas whose times are unknown are left out.
    """
    calls: dict[int, dict[tuple[float, float], int]] = {}
    for manifest in shards:
        metadata = manifest.metadata
        start, end, replica = metadata.get("started_at"), metadata.get("ended_at"), metadata.get("replica")
        if start is None or end is None or replica is None:
            continue
        rows = manifest.rows
        known = calls.setdefault(int(replica), {})
        known[float(start), float(end)] = known.get((float(start), float(end)), 0) + rows
    rates = {}
    for replica, spans in calls.items():
        seconds = sum(end - start for start, end in spans)
        if seconds > 0.0:
            rates[replica] = sum(spans.values()) / seconds
    return rates


def reroute(plan: Plan, rates: Mapping[int, float]) -> Rerouted | None:
    """Return the plan with shares in proportion to measured rates; None where there is nothing to shift.

    Args:
        plan: The plan in force.
        rates: Completions per second by generation replica, all > 0; all replicas must be known.
    """
    task = plan.tasks[RlTask.ACTOR_GENERATION]
    num = len(task.replicas)
    if num < 2 or set(rates) != set(range(num)):
        return None
    total = sum(replica.samples for replica in task.replicas)
    shares = proportional_shares(total, [rates[index] for index in range(num)])
    before = max(replica.samples / rates[index] for index, replica in enumerate(task.replicas))
    after = max(share / rates[index] for index, share in enumerate(shares))
    replicas = tuple(
        replica.model_copy(update={"samples": share}) for replica, share in zip(task.replicas, shares, strict=True)
    )
    changed: TaskPlan = task.model_copy(update={"replicas": replicas})
    tasks = {**plan.tasks, RlTask.ACTOR_GENERATION: changed}
    return Rerouted(plan.model_copy(update={"tasks": tasks}), max(0.0, before / after - 1.0))
