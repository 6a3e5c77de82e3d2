"""Gradient rings that use a link at the same time share it (calibrated model; reconstruction).

The published formula gives every ring links of its own. In a gradient all-reduce all rings of a task (one per stage
and shard) run at once, and a ring leaves a machine once and enters it once, so the rings of replicas on the same
machines queue at the links between them. Per link and direction

    C_link = 2 (R - 1) alpha + sum over the rings that cross it of cv_dp / beta

and no all-reduce ends before its fullest link. Rings visit their machines in the order of the cluster, as ranks are
numbered; links inside a machine are a switched fabric and are not shared.
"""

from __future__ import annotations

from collections.abc import Mapping

from plans.cost.collectives import LinkTimes

Rings = Mapping[tuple[tuple[int, ...], float], int]
"""(machines of a ring, sorted, one entry per GPU; bytes over each of its edges) -> how many such rings there are."""


def fullest_link_s(links: LinkTimes, rings: Rings) -> float:
    """Return the seconds until the fullest link between machines has carried all rings that cross it.

    Args:
        links: the cluster's links.
        rings: the rings of one all-reduce, all with the same number of GPUs.

    Returns:
        0 when every ring lies inside a machine; infinite when a ring needs a forbidden link.
    """
    load_bytes: dict[tuple[int, int], float] = {}
    slowest_s = 0.0
    for machines, carried in _by_machines(rings).items():
        route = _route(machines)
        if any(links.is_forbidden(*link) for link in route):
            # Another order may avoid the forbidden link. Its crossings are not known here, only its slowest edge,
            # and that rings over the same machines share it.
            slowest_s = max(slowest_s, links.ring_s(machines, carried))
            continue
        for link in route:
            load_bytes[link] = load_bytes.get(link, 0.0) + carried
    size = max([len(machines) for machines, _ in rings], default=1)
    return max([slowest_s, *(links.ring_edge_s(*link, size, carried) for link, carried in load_bytes.items())])


def _by_machines(rings: Rings) -> dict[tuple[int, ...], float]:
    """Return the bytes that all rings over the same machines together send over each edge."""
    carried: dict[tuple[int, ...], float] = {}
    for (machines, num_bytes), count in rings.items():
        carried[machines] = carried.get(machines, 0.0) + count * num_bytes
    return carried


def _route(machines: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the links between machines that a ring crosses, in its direction; none inside a single machine."""
    visited = list(dict.fromkeys(machines))
    return [] if len(visited) == 1 else list(zip(visited, [*visited[1:], visited[0]], strict=True))
