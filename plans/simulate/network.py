"""Links as queues: transfers between two machines share the link by waiting for each other, per direction."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from plans.simulate.physics import Physics
from plans.spec.cluster import Cluster

if TYPE_CHECKING:
    import simpy


class Network:
    """All links of a cluster inside one simulation."""

    def __init__(self, env: simpy.Environment, cluster: Cluster, physics: Physics) -> None:
        """Links inside a machine are not shared (switched fabric); links between machines are, per direction."""
        self._env = env
        self._machine_of = cluster.view.machine_of
        self._physics = physics
        self._links: dict[tuple[int, int], simpy.Resource] = {}

    def send(self, source: int, target: int, size_bytes: float) -> Generator[simpy.Event]:
        """Occupy the link for the transfer, then wait for its latency (a process step).

        Raises:
            NoRouteError: the link is forbidden.
        """
        if source == target or size_bytes == 0:
            return
        latency_s, bytes_per_s = self._physics.permitted_link(source, target)
        busy_s = size_bytes / bytes_per_s
        machines = (int(self._machine_of[source]), int(self._machine_of[target]))
        if machines[0] == machines[1]:
            yield self._env.timeout(busy_s + latency_s)
            return
        with self._link(machines).request() as turn:
            yield turn
            yield self._env.timeout(busy_s)
        yield self._env.timeout(latency_s)

    def _link(self, machines: tuple[int, int]) -> simpy.Resource:
        import simpy

        if machines not in self._links:
            self._links[machines] = simpy.Resource(self._env)
        return self._links[machines]
