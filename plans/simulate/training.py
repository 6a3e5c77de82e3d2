"""A training task: its replicas' pipelines, the gradient all-reduce between them, the optimiser, update by update."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

from plans.simulate.network import Network
from plans.simulate.physics import Physics, StagePlace
from plans.simulate.pipeline import MicroBatch, PipelineReplica, ended_quietly
from plans.simulate.recorder import Recorder
from plans.simulate.rings import ring_order

if TYPE_CHECKING:
    import simpy

OPTIMIZER_BYTES_PER_PARAMETER = 12.0
"""Master weight and two Adam moments in fp32."""

T = TypeVar("T")


def shares(items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Cut items into consecutive parts of the given sizes, which add up to their number."""
    ends = list(accumulate(sizes))
    return [list(items[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


class TrainingTask:
    """All replicas of a training task; an outage anywhere restarts it from the start, as a gang does."""

    def __init__(
        self,
        env: simpy.Environment,
        physics: Physics,
        network: Network,
        replicas: Sequence[PipelineReplica],
        stages: Sequence[Sequence[StagePlace]],
        micro_batches: Sequence[Sequence[MicroBatch]],
        *,
        updates: int,
        label: tuple[str, int],
        recorder: Recorder,
    ) -> None:
        """Describe the task; `micro_batches` are per replica, `label` is (RL task, iteration)."""
        self._env, self._physics, self._network = env, physics, network
        self._replicas, self._stages, self._micro_batches = replicas, stages, micro_batches
        self._updates, self._label, self._recorder = updates, label, recorder
        self.gpus = tuple(gpu for replica in replicas for gpu in replica.gpus)

    def run(self) -> Generator[simpy.Event]:
        """Make all updates."""
        import simpy

        started = self._env.now
        running: list[simpy.Process] = []
        try:
            for update in range(self._updates):
                parts = [_part(batches, update, self._updates) for batches in self._micro_batches]
                running = [
                    self._env.process(ended_quietly(replica.run(part)))
                    for replica, part in zip(self._replicas, parts, strict=True)
                ]
                yield self._env.all_of(running)
                yield from self._all_reduce()
                yield self._env.timeout(self._optimizer_s())
        except simpy.Interrupt:
            for process in running:
                if process.is_alive:
                    process.interrupt()
            raise
        finally:
            self._recorder.busy(self.gpus, self._label[0], started, self._env.now, self._label[1])

    def _all_reduce(self) -> Generator[simpy.Event]:
        """Ring all-reduce of every (stage, rank) over the replicas, all rings at once.

        Each ring edge carries 2(R-1)/R of the shard's gradient; each of its 2(R-1) rounds waits for one latency.
        """
        count = len(self._stages)
        if count == 1:
            return
        edges = [self._env.process(self._edge(a, b, size, rounds=2 * (count - 1))) for a, b, size in self._ring_edges()]
        yield self._env.all_of(edges)

    def _ring_edges(self) -> list[tuple[int, int, float]]:
        count = len(self._stages)
        edges = []
        for position, per_replica in enumerate(zip(*self._stages, strict=False)):
            gradient = max(stage.weight_bytes / len(stage.gpus) for stage in per_replica)
            for rank in range(min(len(stage.gpus) for stage in per_replica)):
                members = [self._stages[r][position].gpus[rank] for r in range(count)]
                ring = ring_order(members, self._physics.can_send)
                edges += [
                    (a, b, gradient * 2 * (count - 1) / count) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)
                ]
        return edges

    def _edge(self, source: int, target: int, size: float, rounds: int) -> Generator[simpy.Event]:
        yield from self._network.send(source, target, size)
        latency, _ = self._physics.link(source, target)
        yield self._env.timeout((rounds - 1) * latency)

    def _optimizer_s(self) -> float:
        places = [stage for replica in self._stages for stage in replica]
        return max(self._physics.optimizer_step_s(place, OPTIMIZER_BYTES_PER_PARAMETER) for place in places)


def _part(batches: Sequence[MicroBatch], index: int, parts: int) -> Sequence[MicroBatch]:
    """Return the index-th of `parts` nearly equal consecutive parts."""
    return batches[index * len(batches) // parts : (index + 1) * len(batches) // parts]
