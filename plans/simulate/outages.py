"""Machines that go away and come back: who loses work, and when work may start again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING

from plans.simulate.recorder import Recorder
from plans.simulate.settings import Failure
from plans.spec.cluster import Cluster

if TYPE_CHECKING:
    import simpy

Work = Callable[[], "Generator[simpy.Event]"]


class GpuHall:
    """All GPUs: exclusive use by one piece of work at a time, and outages that end the work on a machine."""

    def __init__(
        self, env: simpy.Environment, cluster: Cluster, failures: Sequence[Failure], recorder: Recorder
    ) -> None:
        """Start a process for each outage."""
        import simpy

        self._env = env
        self._recorder = recorder
        self._machine_of = cluster.view.machine_of
        self._gpus = [simpy.Resource(env) for _ in range(cluster.view.num_gpus)]
        self._down_until = [0.0] * len(cluster.machines)
        self._working: dict[simpy.Process, frozenset[int]] = {}
        names = [machine.name for machine in cluster.machines]
        for failure in failures:
            env.process(self._outage(names.index(failure.machine), failure))

    def work(self, gpus: Iterable[int], start: Work) -> Generator[simpy.Event]:
        """Run `start()` with exclusive use of the GPUs; begin again after each outage of one of their machines."""
        import simpy

        held = sorted(set(gpus))
        machines = frozenset(int(self._machine_of[gpu]) for gpu in held)
        while True:
            requests = [self._gpus[gpu].request() for gpu in held]
            for request in requests:
                yield request
            yield self._env.timeout(max(0.0, max(self._down_until[m] for m in machines) - self._env.now))
            process = self._env.process(start())
            self._working[process] = machines
            try:
                yield process
            except simpy.Interrupt:
                self._recorder.lost_work += 1
                continue
            finally:
                del self._working[process]
                for gpu, request in zip(held, requests, strict=True):
                    self._gpus[gpu].release(request)
            return

    def _outage(self, machine: int, failure: Failure) -> Generator[simpy.Event]:
        yield self._env.timeout(failure.at_s)
        self._down_until[machine] = self._env.now + failure.down_s
        for process, machines in list(self._working.items()):
            if machine in machines and process.is_alive:
                process.interrupt(failure.machine)
