"""Moving new weights from the training GPUs to every machine that generates.

One copy goes over the slowest cut into each region that has no training GPU, from there to the region's other
machines; inside a machine the ranks take their shards at the machine's own bandwidth. Machines that train already
hold the weights.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING

from plans.simulate.network import Network
from plans.simulate.physics import Physics, StagePlace
from plans.spec.cluster import Cluster, IntArray

if TYPE_CHECKING:
    import simpy


class WeightMover:
    """The routes of one plan's weight updates."""

    def __init__(
        self,
        env: simpy.Environment,
        cluster: Cluster,
        physics: Physics,
        network: Network,
        trained: Sequence[StagePlace],
        serving: Sequence[StagePlace],
    ) -> None:
        """Choose the routes from the actor's training stages (`trained`) and generation stages (`serving`)."""
        self._env = env
        self._physics = physics
        self._network = network
        self._view = cluster.view
        self._serving = serving
        self._sources = _one_gpu_per_machine(self._view.machine_of, (g for s in trained for g in s.gpus))
        self._targets = _one_gpu_per_machine(self._view.machine_of, (g for s in serving for g in s.gpus))
        shape = serving[0].shape
        self._model_bytes = float(shape.parameters * serving[0].bytes_per_value)

    def run(self) -> Generator[simpy.Event]:
        """Move the weights; ends when every generation GPU has its shard."""
        by_region: dict[int, list[int]] = {}
        for machine, gpu in self._targets.items():
            if machine not in self._sources:
                by_region.setdefault(int(self._view.region_of[gpu]), []).append(gpu)
        moves = [self._env.process(self._into_region(gpus)) for _, gpus in sorted(by_region.items())]
        yield self._env.all_of(moves)
        yield self._env.timeout(max(self._load_s(stage) for stage in self._serving))

    def _into_region(self, gpus: list[int]) -> Generator[simpy.Event]:
        routes = [(self._transfer_s(source, gpu), source, gpu) for gpu in gpus for source in self._sources.values()]
        _, source, relay = min(routes)
        yield from self._network.send(source, relay, self._model_bytes)
        others = [self._env.process(self._network.send(relay, gpu, self._model_bytes)) for gpu in gpus if gpu != relay]
        yield self._env.all_of(others)

    def _transfer_s(self, source: int, target: int) -> float:
        latency, rate = self._physics.link(source, target)
        return float("inf") if rate == 0 else latency + self._model_bytes / rate

    def _load_s(self, stage: StagePlace) -> float:
        shard = stage.weight_bytes / len(stage.gpus)
        rates = [self._physics.link(gpu, other)[1] for gpu in stage.gpus for other in stage.gpus if gpu != other]
        return shard / min(rates) if rates else 0.0


def _one_gpu_per_machine(machine_of: IntArray, gpus: Iterable[int]) -> dict[int, int]:
    first: dict[int, int] = {}
    for gpu in sorted(gpus):
        first.setdefault(int(machine_of[gpu]), gpu)
    return first
