"""Micro-batch pipelines of inference and training replicas.

Every stage of every replica is a process that works through its list of passes: forward only for inference,
one-forward-one-backward for training (stage j of p does p-1-j forward passes ahead, then alternates). A pass waits
for its input from the neighbour, which travels over the network and so shares links with everything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plans.simulate.network import Network
from plans.simulate.physics import Physics, StagePlace

if TYPE_CHECKING:
    import simpy


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens of one micro-batch."""

    tokens: float
    attended: float
    """Sum over tokens of the positions that each attends to (causal)."""

    @staticmethod
    def of(lengths: Sequence[float]) -> MicroBatch:
        """Build a micro-batch from the lengths of its sequences, without padding."""
        return MicroBatch(tokens=sum(lengths), attended=sum(n * (n + 1) / 2 for n in lengths))


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one micro-batch through one stage."""

    micro_batch: int
    is_backward: bool


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[Pass]:
    """Return the order of passes on a stage of a 1F1B pipeline.

    Example: stage 0 of 2 with 3 micro-batches does F0 F1 B0 F2 B1 B2.
    """
    ahead = min(num_stages - 1 - stage, num_micro_batches)
    order = [Pass(m, is_backward=False) for m in range(ahead)]
    for m in range(ahead, num_micro_batches):
        order += [Pass(m, is_backward=False), Pass(m - ahead, is_backward=True)]
    return order + [Pass(m, is_backward=True) for m in range(num_micro_batches - ahead, num_micro_batches)]


class PipelineReplica:
    """One replica of an inference or training task."""

    def __init__(
        self,
        env: simpy.Environment,
        physics: Physics,
        network: Network,
        stages: Sequence[StagePlace],
        *,
        is_training: bool,
        is_recomputed: bool,
    ) -> None:
        """Describe the replica."""
        self._env = env
        self._physics = physics
        self._network = network
        self._stages = stages
        self._is_training = is_training
        self._is_recomputed = is_recomputed
        self.gpus = tuple(gpu for stage in stages for gpu in stage.gpus)

    def run(self, micro_batches: Sequence[MicroBatch]) -> Generator[simpy.Event]:
        """Pass all micro-batches through the pipeline; ends when every stage is done."""
        import simpy

        events = {
            (stage, step): self._env.event()
            for stage in range(len(self._stages))
            for step in self._passes(stage, len(micro_batches))
        }
        stages = [
            self._env.process(ended_quietly(self._stage(j, micro_batches, events))) for j in range(len(self._stages))
        ]
        try:
            yield self._env.all_of(stages)
        except simpy.Interrupt:
            for process in stages:
                if process.is_alive:
                    process.interrupt()
            raise

    def _passes(self, stage: int, count: int) -> list[Pass]:
        if self._is_training:
            return one_forward_one_backward(stage, len(self._stages), count)
        return [Pass(m, is_backward=False) for m in range(count)]

    def _stage(
        self, index: int, micro_batches: Sequence[MicroBatch], arrived: dict[tuple[int, Pass], simpy.Event]
    ) -> Generator[simpy.Event]:
        place = self._stages[index]
        for step in self._passes(index, len(micro_batches)):
            if self._needs_input(index, step):
                yield arrived[index, step]
            batch = micro_batches[step.micro_batch]
            yield self._env.timeout(self._pass_s(place, batch, step))
            target = index - 1 if step.is_backward else index + 1
            if 0 <= target < len(self._stages):
                self._env.process(self._deliver(index, target, batch, arrived[target, step]))

    def _needs_input(self, index: int, step: Pass) -> bool:
        return index < len(self._stages) - 1 if step.is_backward else index > 0

    def _pass_s(self, place: StagePlace, batch: MicroBatch, step: Pass) -> float:
        if step.is_backward:
            return self._physics.backward_s(
                place, batch.tokens, batch.attended, batch.tokens, is_recomputed=self._is_recomputed
            )
        return self._physics.forward_s(place, batch.tokens, batch.attended, batch.tokens)

    def _deliver(self, source: int, target: int, batch: MicroBatch, event: simpy.Event) -> Generator[simpy.Event]:
        a, b = self._stages[source], self._stages[target]
        size = self._physics.activation_bytes(a, batch.tokens)
        yield from self._network.send(a.gpus[0], b.gpus[0], size)
        event.succeed()


def ended_quietly(work: Generator[simpy.Event]) -> Generator[simpy.Event]:
    """Run a part of a larger piece of work that ends without an error when the whole is interrupted."""
    import simpy

    with contextlib.suppress(simpy.Interrupt):
        yield from work
