"""Replica configurations psi of the rollout plan: shapes, throughput h and the rollouts that a deadline allows.

HexGen's throughput model has the same terms as the project's cost model, so that one is used: what is counted here is
what `price` charges. A configuration is a chain of blocks; a block is some pipeline stages of equal TP degree inside
one machine, and TP never leaves a machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plans.cost.compact import CompactTask
from plans.cost.evaluator import PlanEvaluator
from plans.search.areal_hex.machine_classes import MachineClass
from plans.search.balancing import TaskRates
from plans.search.degrees import tp_degrees
from plans.search.layouts import LayerSplit
from plans.spec.llm import LlmShape
from plans.workflow import RlTask, shape_of

#: Pipeline stages of a replica inside one machine.
INNER_STAGES = (1, 2, 4, 8)
#: Machines that a replica spans at most where it fits fewer.
MOST_BLOCKS = 16
#: Share of the best rate of its size that a configuration must have (a smaller batch may have a shorter tail).
WORTHWHILE = 0.8


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """Blocks of one replica."""

    tp: int
    """TP degree of every stage."""
    blocks: tuple[tuple[int, int], ...]
    """Per block: index of the machine class, pipeline stages in that machine."""

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Per block: class, GPUs taken from one machine."""
        return tuple((where, stages * self.tp) for where, stages in self.blocks)

    @property
    def num_gpus(self) -> int:
        """GPUs of the replica."""
        return sum(size for _, size in self.sizes)


@dataclass(eq=False)
class Configuration:
    """A shape with what it can do on representative machines."""

    shape: ReplicaShape
    """Its blocks."""
    placement: CompactTask
    """One replica on the first machines of its classes, layers balanced."""
    room: int
    """Sequences that its memory holds together."""
    evaluator: PlanEvaluator
    """Prices it."""
    tail_aware: bool
    """Repair 6."""
    _seconds: dict[int, float] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers per pipeline stage."""
        return self.placement.layers

    def seconds(self, rollouts: int) -> float:
        """Return the seconds that one replica takes for so many rollouts, as `price` would charge them."""
        found = self._seconds.get(rollouts)
        if found is None:
            batch = max(1, min(self.room, rollouts))
            found = self.evaluator.replica_s(RlTask.ACTOR_GENERATION, self.placement, 0, rollouts, batch)
            self._seconds[rollouts] = found
        return found

    @property
    def rollout_s(self) -> float:
        """Seconds per rollout of a replica that is kept full: without the tail."""
        return (self.seconds(4 * self.room) - self.seconds(2 * self.room)) / (2 * self.room)

    def most_by(self, deadline_s: float, limit: int) -> int:
        """Return how many rollouts, at most `limit`, one replica finishes by a deadline."""
        if not self.tail_aware:
            return min(limit, int(deadline_s / self.rollout_s + 1e-9))
        if self.seconds(limit) <= deadline_s:
            return limit
        low, high = 0, limit
        while high - low > 1:
            middle = (low + high) // 2
            if self.seconds(middle) <= deadline_s:
                low = middle
            else:
                high = middle
        return low


class ConfigurationBook:
    """All configurations of a problem, by the GPUs that machines of each class can still give."""

    def __init__(
        self, evaluator: PlanEvaluator, classes: Sequence[MachineClass], *, tail_aware: bool, pipelined: bool
    ) -> None:
        """Prepare; configurations are priced when first asked for.

        Args:
            evaluator: prices replicas.
            classes: the machines.
            tail_aware: repair 6.
            pipelined: whether pipelines are offered where TP alone holds the model.
        """
        self._evaluator, self._classes, self._tail_aware = evaluator, tuple(classes), tail_aware
        self._pipelined = pipelined
        self._shape: LlmShape = shape_of(evaluator.job, RlTask.ACTOR_GENERATION)
        self._rates = TaskRates(evaluator, RlTask.ACTOR_GENERATION, 1)
        sizes = np.bincount(evaluator.view.machine_of, minlength=len(evaluator.view.machine_names))
        self._first_gpu: list[int] = np.concatenate(([0], np.cumsum(sizes)))[:-1].astype(int).tolist()
        self._known: dict[ReplicaShape, Configuration | None] = {}

    def available(
        self, largest: Mapping[int, int], machines: Mapping[int, int], least_gpus: int = 1
    ) -> list[Configuration]:
        """Return the configurations that fit what is left, without those that are surely beaten.

        Args:
            largest: GPUs of the fullest machine of each class.
            machines: machines with GPUs left, by class.
            least_gpus: GPUs of a replica at least.
        """
        found = [c for shape in self._single(largest) if (c := self.configuration(shape)) is not None]
        single = [c for c in found if c.shape.num_gpus >= least_gpus]
        if not self._pipelined and any(_is_flat(c.shape) for c in found):
            return [c for c in single if _is_flat(c.shape)]
        rate: dict[tuple[int, int], float] = {}
        for configuration in single:
            ((where, size),) = configuration.shape.sizes
            rate[where, size] = max(rate.get((where, size), 0.0), 1.0 / configuration.rollout_s)
        kept = [c for c in single if 1.0 / c.rollout_s >= rate[c.shape.sizes[0]] * WORTHWHILE]
        for shape in self._spanning(largest, machines, needed=not single):
            alone = _alone(rate, shape)
            spanning = self.configuration(shape)
            if spanning is not None and (alone is None or 1.0 / spanning.rollout_s > alone):
                kept.append(spanning)
        return kept

    def configuration(self, shape: ReplicaShape) -> Configuration | None:
        """Return a shape's configuration; None where its memory does not hold one sequence."""
        if shape not in self._known:
            self._known[shape] = self._make(shape)
        return self._known[shape]

    def _single(self, largest: Mapping[int, int]) -> list[ReplicaShape]:
        found = []
        for where, most in sorted(largest.items()):
            for tp in self._tps(most):
                found += [
                    ReplicaShape(tp, ((where, stages),))
                    for stages in INNER_STAGES
                    if tp * stages <= most and stages <= self._shape.layers
                ]
        return found

    def _spanning(self, largest: Mapping[int, int], machines: Mapping[int, int], *, needed: bool) -> list[ReplicaShape]:
        """Return replicas over two machines, and over more where no machine holds the model."""
        found: list[ReplicaShape] = []
        for a, b in itertools.combinations_with_replacement(sorted(largest), 2):
            if a == b and machines[a] < 2:
                continue
            for tp in self._tps(min(largest[a], largest[b])):
                inner = [s for s in INNER_STAGES if tp * s <= min(largest[a], largest[b])]
                found += [ReplicaShape(tp, ((a, s), (b, s))) for s in inner if 2 * s <= self._shape.layers]
        if needed and not any(self.configuration(shape) for shape in found):
            found += self._long_chains(largest, machines)
        return found

    def _long_chains(self, largest: Mapping[int, int], machines: Mapping[int, int]) -> list[ReplicaShape]:
        chain = [where for where in sorted(largest) for _ in range(machines[where])]
        found = []
        for length in range(3, min(len(chain), MOST_BLOCKS) + 1):
            for start in range(len(chain) - length + 1):
                members = chain[start : start + length]
                blocks = tuple((m, 1) for m in members)
                found += [ReplicaShape(tp, blocks) for tp in self._tps(min(largest[m] for m in members))]
        return list(dict.fromkeys(shape for shape in found if len(shape.blocks) <= self._shape.layers))

    def _tps(self, most: int) -> tuple[int, ...]:
        return tuple(tp for tp in tp_degrees(self._shape, most) if tp & (tp - 1) == 0)

    def _make(self, shape: ReplicaShape) -> Configuration | None:
        stages: list[list[int]] = []
        used: dict[int, int] = {}
        for where, inner in shape.blocks:
            machine = self._classes[where].machines[used.get(where, 0)]
            used[where] = used.get(where, 0) + 1
            start = self._first_gpu[machine]
            stages += [list(range(start + s * shape.tp, start + (s + 1) * shape.tp)) for s in range(inner)]
        grid = np.array([stages], dtype=np.int32)
        layers = self._rates.layers(grid, LayerSplit.SPEED)
        if layers is None:
            return None
        placement = CompactTask(grid, layers, (self._evaluator.job.num_samples,))
        tasks = {RlTask.ACTOR_GENERATION: placement}
        room = self._evaluator.memory.group_memory((RlTask.ACTOR_GENERATION,), tasks).decode_rooms[0]
        if room < 1 or not np.isfinite(self._evaluator.replica_s(RlTask.ACTOR_GENERATION, placement, 0, room, room)):
            return None
        return Configuration(shape, placement, room, self._evaluator, self._tail_aware)


def nested_uses(shape: ReplicaShape, levels: Mapping[int, Sequence[int]]) -> dict[Hashable, int]:
    """Return what a replica takes of each resource (class, size): GPUs of its blocks of at least that size.

    Block sizes are powers of two, and blocks of dividing sizes pack exactly when, for every size, those at least as
    large fit the whole multiples of it that the machines have. So machines need no variables of their own.
    """
    uses: dict[Hashable, int] = {}
    for where, size in shape.sizes:
        for level in levels[where]:
            if size >= level:
                uses[where, level] = uses.get((where, level), 0) + size
    return uses


def _is_flat(shape: ReplicaShape) -> bool:
    return shape.blocks[0][1] == 1 and len(shape.blocks) == 1


def _alone(rate: Mapping[tuple[int, int], float], shape: ReplicaShape) -> float | None:
    """Return the rollouts per second of the best replicas inside the blocks; None where a block holds none."""
    parts = [rate.get(block) for block in shape.sizes]
    return None if None in parts else sum(part for part in parts if part is not None)
