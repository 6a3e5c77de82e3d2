"""Phase 1b: replicas and rollouts on the rollout GPUs (AReaL-Hex)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from plans.balance import proportional_shares
from plans.cost.compact import CompactTask
from plans.cost.evaluator import PlanEvaluator
from plans.search.areal_hex.configurations import Configuration, ConfigurationBook, nested_uses
from plans.search.areal_hex.counts import Option, best_whole_counts, greedy_counts, most_rate
from plans.search.areal_hex.length_buckets import LengthDealer
from plans.search.areal_hex.machine_classes import MachineClass
from plans.search.areal_hex.settings import ArealHexSettings
from plans.workflow import RlTask


@dataclass(frozen=True, slots=True)
class RolloutReplica:
    """One replica of the rollout plan."""

    configuration: Configuration
    """Shape, layers and rates."""
    stages: tuple[tuple[int, ...], ...]
    """GPU indices per pipeline stage."""
    rollouts: int
    """Rollouts per iteration."""
    decode_batch: int
    """Sequences decoded together."""
    lengths: tuple[int, int] | None = None
    """Response lengths that it is meant for, tokens; None = any."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """All replicas, and the slowest one's seconds by the cost model."""

    replicas: tuple[RolloutReplica, ...]
    seconds: float

    @property
    def slots(self) -> list[list[tuple[int, tuple[int, ...]]]]:
        """Stages of each replica as (layers, GPUs), for weight transfers."""
        return [list(zip(r.configuration.layers, r.stages, strict=True)) for r in self.replicas]


class RolloutPlanner:
    """Makes rollout plans for the GPUs left per machine."""

    def __init__(self, evaluator: PlanEvaluator, classes: Sequence[MachineClass], settings: ArealHexSettings) -> None:
        """Prepare the configurations."""
        self._evaluator, self._classes, self._settings = evaluator, tuple(classes), settings
        self._book = ConfigurationBook(
            evaluator, classes, tail_aware=settings.tail_aware, pipelined=settings.pipelined_rollouts
        )
        self._dealer = LengthDealer(evaluator) if settings.length_buckets else None
        self._total = evaluator.job.num_samples
        decode = evaluator.terms[RlTask.ACTOR_GENERATION].decode
        self._tokens = decode.lengths.response if decode is not None else 1.0
        self._known: dict[tuple[object, ...], tuple[list[Configuration], tuple[int, ...]] | None] = {}

    def plan(self, free: Mapping[int, Sequence[int]], least_gpus: int = 1) -> RolloutPlan | None:
        """Return the plan with the least rollout time.

        Args:
            free: free GPUs by machine.
            least_gpus: GPUs of a replica at least; fewer, larger replicas mean fewer copies of new weights.

        Returns:
            The plan; None where no replica fits.
        """
        counted = self._counted(free, least_gpus)
        if counted is None:
            return None
        configurations, counts = counted
        chosen = [c for c, count in zip(configurations, counts, strict=True) for _ in range(count)]
        placed = _place(chosen, free, self._classes)
        if self._dealer is not None:
            return self._dealt(self._dealer, chosen, placed)
        shares = self._shares(chosen)
        replicas = tuple(
            RolloutReplica(c, stages, share, max(1, min(c.room, share)))
            for c, stages, share in zip(chosen, placed, shares, strict=True)
            if share > 0
        )
        return RolloutPlan(replicas, self._seconds(replicas)) if replicas else None

    def _dealt(
        self, dealer: LengthDealer, chosen: Sequence[Configuration], placed: Sequence[tuple[tuple[int, ...], ...]]
    ) -> RolloutPlan:
        """Return the plan with rollouts dealt by length."""
        even = max(1, self._total // len(chosen))
        batches = [max(1, min(c.room, even)) for c in chosen]
        tasks = [
            CompactTask(np.array([stages], dtype=np.int32), c.layers, (even,))
            for c, stages in zip(chosen, placed, strict=True)
        ]
        dealt = dealer.deal(list(zip(tasks, batches, strict=True)))
        replicas = tuple(
            RolloutReplica(c, placed[i], share, max(1, min(batches[i], share)), dealt.lengths(dealer.buckets, i))
            for i, c in enumerate(chosen)
            if (share := int(dealt.counts[i].sum())) > 0
        )
        return RolloutPlan(replicas, dealt.seconds)

    def _counted(
        self, free: Mapping[int, Sequence[int]], least_gpus: int
    ) -> tuple[list[Configuration], tuple[int, ...]] | None:
        sizes = {
            index: [n for machine in c.machines if (n := len(free.get(machine, ()))) > 0]
            for index, c in enumerate(self._classes)
        }
        key = (least_gpus, *(tuple(sorted(sizes[index])) for index in sizes))
        if key not in self._known:
            self._known[key] = self._count({index: found for index, found in sizes.items() if found}, least_gpus)
        return self._known[key]

    def _count(
        self, sizes: Mapping[int, Sequence[int]], least_gpus: int
    ) -> tuple[list[Configuration], tuple[int, ...]] | None:
        largest = {index: max(found) for index, found in sizes.items()}
        machines = {index: len(found) for index, found in sizes.items()}
        available = self._book.available(largest, machines, least_gpus)
        configurations = [c for c in available if c.shape.num_gpus >= least_gpus]
        if not configurations:
            return None
        levels: dict[int, list[int]] = {index: [] for index in sizes}
        for configuration in configurations:
            for where, size in configuration.shape.sizes:
                if size not in levels[where]:
                    levels[where].append(size)
        capacity: dict[Hashable, int] = {
            (where, level): sum(n // level * level for n in sizes[where])
            for where, found in levels.items()
            for level in sorted(found)
        }
        options = [
            Option(nested_uses(c.shape, levels), self._tokens / c.rollout_s, c.shape.num_gpus) for c in configurations
        ]
        counts = self._solve(configurations, options, capacity)
        return (configurations, counts) if any(counts) else None

    def _solve(
        self, configurations: Sequence[Configuration], options: Sequence[Option], capacity: Mapping[Hashable, int]
    ) -> tuple[int, ...]:
        if not self._settings.knapsack_counts:
            return greedy_counts(options, capacity)
        if not self._settings.whole_rollouts:
            return most_rate(options, capacity, [option.tokens_per_s for option in options])
        capacity_at = [partial(_most_by, c, self._total) for c in configurations]
        upper_s = max(c.seconds(self._total) for c in configurations)
        return best_whole_counts(options, capacity, capacity_at, self._total, upper_s)[0]

    def _shares(self, chosen: Sequence[Configuration]) -> list[int]:
        """Return whole rollouts per replica: by the least deadline, or rounded from fractional shares."""
        if not self._settings.whole_rollouts:
            least = 1 if len(chosen) <= self._total else 0
            return list(proportional_shares(self._total, [1.0 / c.rollout_s for c in chosen], least=least))
        kinds = list(dict.fromkeys(chosen))
        low, high = 0.0, max(c.seconds(self._total) for c in kinds)
        for _ in range(60):
            middle = (low + high) / 2.0
            by_kind = {c: c.most_by(middle, self._total) for c in kinds}
            if sum(by_kind[c] for c in chosen) >= self._total:
                high = middle
            else:
                low = middle
            if high - low <= 1e-9 * high:
                break
        shares = [c.most_by(high, self._total) for c in chosen]
        return _trimmed(shares, sum(shares) - self._total)

    def _seconds(self, replicas: Sequence[RolloutReplica]) -> float:
        """Return what `price` charges: on the real machines, tail included."""
        seconds = 0.0
        for replica in replicas:
            placement = replica.configuration.placement
            seconds = max(seconds, _real_seconds(self._evaluator, placement.layers, replica))
        return seconds if replicas else math.inf


def _most_by(configuration: Configuration, limit: int, deadline_s: float) -> int:
    return configuration.most_by(deadline_s, limit)


def _real_seconds(evaluator: PlanEvaluator, layers: tuple[int, ...], replica: RolloutReplica) -> float:
    grid = np.array([replica.stages], dtype=np.int32)
    placement = CompactTask(grid, layers, (replica.rollouts,))
    return evaluator.replica_s(RlTask.ACTOR_GENERATION, placement, 0, replica.rollouts, replica.decode_batch)


def _trimmed(shares: list[int], excess: int) -> list[int]:
    """Take what is too much from the largest shares, one at a time; replicas may end with none."""
    for _ in range(excess):
        largest = max(range(len(shares)), key=lambda i: (shares[i], i))
        shares[largest] -= 1
    return shares


def _place(
    chosen: Sequence[Configuration], free: Mapping[int, Sequence[int]], classes: Sequence[MachineClass]
) -> list[tuple[tuple[int, ...], ...]]:
    """Return GPU indices per stage of each replica: largest blocks first, each where it fits best.

    Blocks of one replica that lie in one class go to different machines.
    """
    left = {machine: list(gpus) for machine, gpus in free.items()}
    order = sorted(range(len(chosen)), key=lambda i: (-max(size for _, size in chosen[i].shape.sizes), i))
    placed: dict[int, tuple[tuple[int, ...], ...]] = {}
    for i in order:
        shape, used, stages = chosen[i].shape, set[int](), []
        for where, size in shape.sizes:
            fitting = [m for m in classes[where].machines if m not in used and len(left.get(m, ())) >= size]
            machine = _tightest(fitting or [m for m in classes[where].machines if len(left.get(m, ())) >= size], left)
            used.add(machine)
            taken, left[machine] = left[machine][:size], left[machine][size:]
            stages += [tuple(taken[s : s + shape.tp]) for s in range(0, size, shape.tp)]
        placed[i] = tuple(stages)
    return [placed[i] for i in range(len(chosen))]


def _tightest(machines: Sequence[int], left: Mapping[int, Sequence[int]]) -> int:
    """Return the machine that a block fills best: exact fits keep large holes for large blocks."""
    return min(machines, key=lambda m: (len(left[m]), m))
