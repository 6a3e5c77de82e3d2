"""Continuous batching of one generation replica.

The replica holds at most `decode_batch` sequences. Whenever there is room it admits waiting samples, whose prompts are
prefilled at once; otherwise it decodes. Between two changes of the batch (an end of a sequence, an admission) every
step is alike but for the growing cache, so a stretch of steps is one event whose length is that of its middle step
times their number. With several pipeline stages the batch is split into as many groups as stages, which follow each
other through the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plans.simulate.physics import Physics, StagePlace
from plans.simulate.recorder import Recorder

if TYPE_CHECKING:
    import simpy


@dataclass(slots=True)
class SampleQueue:
    """Response lengths that wait for a replica; `QUEUE` dispatch shares one between replicas."""

    waiting: deque[int] = field(default_factory=deque)

    def take(self, count: int) -> list[int]:
        """Remove and return up to `count` samples, oldest first."""
        return [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]

    def give_back(self, lengths: Sequence[int]) -> None:
        """Return samples that were lost, to the front."""
        self.waiting.extendleft(reversed(lengths))


@dataclass(slots=True)
class _Sequence:
    length: int
    """Response tokens in the end."""
    made: int = 0
    """Response tokens so far."""


class GenerationReplica:
    """One replica of `actor_generation`."""

    def __init__(
        self,
        env: simpy.Environment,
        physics: Physics,
        stages: Sequence[StagePlace],
        decode_batch: int,
        prompt_tokens: float,
        recorder: Recorder,
    ) -> None:
        """Describe the replica; `prompt_tokens` is the prompt length of every sample."""
        self._env = env
        self._physics = physics
        self._stages = stages
        self._decode_batch = decode_batch
        self._prompt_tokens = prompt_tokens
        self._recorder = recorder
        self.gpus = tuple(gpu for stage in stages for gpu in stage.gpus)

    def run(self, queue: SampleQueue, iteration: int) -> Generator[simpy.Event]:
        """Generate until the queue is empty; when interrupted (an outage), give the unfinished samples back."""
        import simpy

        active: list[_Sequence] = []
        started = self._env.now
        try:
            while queue.waiting or active:
                admitted = queue.take(self._decode_batch - len(active))
                active.extend(_Sequence(length) for length in admitted)
                if admitted:
                    yield self._env.timeout(self._prefill_s(len(admitted)))
                steps = min(sequence.length - sequence.made for sequence in active)
                yield self._env.timeout(steps * self._step_s(active, steps))
                active = _advance(active, steps)
        except simpy.Interrupt:
            queue.give_back([sequence.length for sequence in active])
            raise
        finally:
            self._recorder.busy(self.gpus, "actor_generation", started, self._env.now, iteration)

    def _prefill_s(self, sequences: int) -> float:
        """Seconds until the prompts of newly admitted sequences have passed all stages, group after group."""
        groups = min(len(self._stages), sequences)
        tokens = sequences * self._prompt_tokens / groups
        attended = tokens * (self._prompt_tokens + 1) / 2
        per_stage = [self._physics.forward_s(stage, tokens, attended, sequences / groups) for stage in self._stages]
        return sum(per_stage) + self._hops_s(tokens) + (groups - 1) * max(per_stage)

    def _step_s(self, active: Sequence[_Sequence], steps: int) -> float:
        """Seconds per decode step, at the middle of a stretch of `steps`."""
        groups = len(self._stages)
        cached = sum(self._prompt_tokens + sequence.made for sequence in active) + len(active) * steps / 2
        per_stage = [
            self._physics.decode_step_s(stage, len(active) / groups, cached / groups) for stage in self._stages
        ]
        hops_s = self._hops_s(len(active) / groups)
        return max(sum(per_stage) + hops_s, groups * max(per_stage))

    def _hops_s(self, tokens: float) -> float:
        total = 0.0
        for a, b in zip(self._stages, self._stages[1:], strict=False):
            latency, rate = self._physics.link(a.gpus[-1], b.gpus[0])
            total += latency + self._physics.activation_bytes(a, tokens) / rate
        return total


def _advance(active: list[_Sequence], steps: int) -> list[_Sequence]:
    for sequence in active:
        sequence.made += steps
    return [sequence for sequence in active if sequence.made < sequence.length]
