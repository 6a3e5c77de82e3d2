"""A testbed: a cluster together with what is published about it and what is reconstructed."""

from __future__ import annotations

from dataclasses import dataclass

from plans.errors import PlanningError
from plans.spec.cluster import Cluster, Links, Machine
from plans.spec.cluster_rules import cluster_faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """A named cluster with its provenance."""

    __test__ = False  # the name starts like a test class

    cluster: Cluster
    """The cluster."""
    published: tuple[str, ...]
    """What the source states, one sentence each."""
    reconstructed: tuple[str, ...]
    """What the source leaves open and was chosen here, one sentence each."""


class UnknownTestbedError(PlanningError):
    """A testbed name that is not registered, or a subset that it does not have."""


def machine_subset(testbed: Testbed, counts: dict[str, int], *, name: str) -> Testbed:
    """Return a testbed cut down to `counts[gpu_type]` GPUs, taken machine by machine in document order.

    Links of regions and machines that disappear are dropped, so the result is a valid cluster of its own.

    Raises:
        UnknownTestbedError: the testbed has fewer GPUs of a type than asked for.
    """
    left = dict(counts)
    kept: list[Machine] = []
    for machine in testbed.cluster.machines:
        take = min(machine.count, left.get(machine.gpu, 0))
        if take:
            kept.append(machine.model_copy(update={"count": take}))
            left[machine.gpu] -= take
    missing = {gpu: count for gpu, count in left.items() if count}
    if missing:
        raise UnknownTestbedError(f"{testbed.cluster.name} lacks {missing} of the GPUs asked for; ask for fewer.")
    cluster = Cluster(
        name=name,
        gpu_types=testbed.cluster.gpu_types,
        machines=tuple(kept),
        links=_links_between(testbed.cluster.links, kept),
    )
    return Testbed(
        cluster=cluster,
        published=testbed.published,
        reconstructed=(*testbed.reconstructed, f"A subset of {testbed.cluster.name}: {counts}, machine by machine."),
    )


def checked(testbed: Testbed) -> Testbed:
    """Return the testbed; raises UnknownTestbedError when its cluster breaks a rule of the format (a fault of ours)."""
    faults = cluster_faults(testbed.cluster)
    if faults:
        raise UnknownTestbedError(f"testbed {testbed.cluster.name} is not a valid cluster: {faults[0].sentence()}")
    return testbed


def _links_between(links: Links, machines: list[Machine]) -> Links:
    regions, names = {m.region for m in machines}, {m.name for m in machines}
    return links.model_copy(
        update={
            "regions": tuple(link for link in links.regions if link.pair <= regions),
            "machines": tuple(link for link in links.machines if link.pair <= names),
        }
    )
