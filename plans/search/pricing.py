"""Candidate -> balanced compact plan -> price. The only door from the search to the cost model."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from plans.cost.cache import BoundedCache, entries_for
from plans.cost.compact import CompactPlan, CompactTask, read_only_grid
from plans.cost.evaluator import Evaluation, PlanEvaluator
from plans.cost.lineup import Lineup
from plans.search.balancing import Balancing, TaskRates, share_samples
from plans.search.genome import Genome
from plans.search.layouts import LayerSplit, TaskLayout
from plans.search.limits import NO_LIMITS, Limits
from plans.spec.job import Job
from plans.workflow import RlTask, TaskKind

#: Balanced tasks kept (each some kilobytes at 1,024 GPUs).
CACHE_ENTRIES = 20_000


class Price(NamedTuple):
    """Rank of a candidate: cheaper first, and among the infeasible ones the less overfull first."""

    score_s: float
    """Seconds per iteration; infinite when infeasible."""
    overflow_bytes: float
    """Bytes lacking, summed over GPUs."""

    @property
    def is_feasible(self) -> bool:
        """Whether the candidate can run."""
        return math.isfinite(self.score_s)


UNPLACEABLE = Price(math.inf, math.inf)


class Pricer:
    """Balances and prices candidates of one problem; counts what it prices."""

    def __init__(self, evaluator: PlanEvaluator, balancing: Balancing, limits: Limits = NO_LIMITS) -> None:
        """Keep the evaluator; its caches and this object's do not change any result."""
        self._limits = limits
        self.evaluator = evaluator
        self.balancing = balancing
        self.count = 0
        job: Job = evaluator.job
        self._total = job.num_samples
        self._rates = {task: TaskRates(evaluator, task, self._micro_batch(task)) for task in evaluator.tasks}
        view = evaluator.view
        usable = np.minimum(job.generation.memory_fraction * view.memory_bytes, view.memory_bytes - view.reserve_bytes)
        first = view.machine_of.searchsorted(range(len(view.machine_names)))
        self._usable: list[float] = usable[first].tolist()
        self._cap = job.generation.max_num_seqs
        self._decoding: BoundedCache[tuple[CompactTask, tuple[int, ...]], CompactTask] = BoundedCache(CACHE_ENTRIES)
        lineups = min(CACHE_ENTRIES, entries_for(view.num_gpus))
        self._shares: BoundedCache[Hashable, tuple[int, ...]] = BoundedCache(lineups)
        self._alone: BoundedCache[Hashable, tuple[float, float]] = BoundedCache(lineups)
        self._allows = lru_cache(maxsize=CACHE_ENTRIES)(self._allows_uncached)
        self._even = lru_cache(maxsize=CACHE_ENTRIES)(self._even_uncached)
        self._balanced = lru_cache(maxsize=CACHE_ENTRIES)(self._balanced_uncached)

    def price(self, genome: Genome) -> Price:
        """Return the rank of a candidate."""
        self.count += 1
        plan = self.compact(genome)
        if plan is None:
            return UNPLACEABLE
        return Price(*self.evaluator.score(plan))

    def evaluation(self, genome: Genome) -> Evaluation | None:
        """Return the whole price of a candidate; None where a task cannot be placed at all."""
        plan = self.compact(genome)
        return None if plan is None else self.evaluator.evaluate(plan)

    def compact(self, genome: Genome) -> CompactPlan | None:
        """Return the balanced placement of a candidate.

        None where a task has fewer layers or samples than parts, or where an engine can't run its layout.
        """
        if self._limits and not (
            all(self._allows(task, layout) for task, layout in genome.layouts.items())
            and self._limits.are_together(genome.layouts, self.evaluator.view)
        ):
            return None
        tasks: dict[RlTask, CompactTask] = {}
        for task, layout in genome.layouts.items():
            if task is not RlTask.ACTOR_GENERATION:
                balanced = self._balanced(task, layout)
                if balanced is None:
                    return None
                tasks[task] = balanced
        generation = self._generation(genome, tasks)
        if generation is None:
            return None
        tasks[RlTask.ACTOR_GENERATION] = generation
        return CompactPlan(groups=genome.grouping, tasks=tasks)

    def task_s(self, task: RlTask, layout: TaskLayout, held_bytes: float = 0.0) -> tuple[float, float]:
        """Return (seconds, largest share of a GPU's memory that stays resident) of one task alone.

        Args:
            task: the task.
            layout: its layout.
            held_bytes: bytes of other models assumed on each GPU (they take room from the key/value cache).
        """
        lineup = self.evaluator.lineups.of(layout.gpus, layout.pp, layout.tp)
        key = (task, lineup, layout.split, held_bytes)
        found = self._alone.get(key)
        if found is None:
            found = self._alone_s(task, lineup, layout.split, held_bytes)
            self._alone.put(key, found)
        return found

    def _alone_s(self, task: RlTask, lineup: Lineup, split: LayerSplit, held_bytes: float) -> tuple[float, float]:
        dp = len(lineup.rows)
        if dp > self._total:
            return math.inf, math.inf
        rates, pricer, mbs = self._rates[task], self.evaluator.pricer_of(task), self._micro_batch(task)
        layers = rates.layers_of(lineup, split if self.balancing.layers else LayerSplit.EVEN)
        if layers is None:
            return math.inf, math.inf
        share = rates.share_of(lineup, layers)
        if task.kind is not TaskKind.GENERATION:
            is_balanced = self.balancing.other_samples
            samples = self._samples(task, lineup, layers) if is_balanced else self._even_samples(dp)
            return pricer.task_s(lineup, layers, mbs, samples, ()), share
        rooms = self._lone_rooms(lineup, layers, held_bytes)
        if min(rooms) < 1:
            return math.inf, math.inf
        is_balanced = self.balancing.generation_samples
        samples = self._samples(task, lineup, layers, rooms) if is_balanced else self._even_samples(dp)
        batches = [max(1, min(room, count)) for room, count in zip(rooms, samples, strict=True)]
        return pricer.task_s(lineup, layers, mbs, samples, batches), share

    def _lone_rooms(self, lineup: Lineup, layers: tuple[int, ...], held_bytes: float) -> tuple[int, ...]:
        """Return how many sequences each replica of generation can decode together beside what is held."""
        memory, usable = self.evaluator.memory, self._usable
        resident = memory.stage_bytes(RlTask.ACTOR_GENERATION, layers, lineup.tp, len(lineup.rows)) + held_bytes
        needs = list(zip(resident.tolist(), memory.cache_bytes(layers, lineup.tp).tolist(), strict=True))
        rooms = {}
        for row in lineup.distinct:
            free = [usable[site] if isinstance(site, int) else min([usable[place] for place in site]) for site in row]
            fits = min([(most - held) / each for most, (held, each) in zip(free, needs, strict=True)])
            rooms[row] = max(0, min(self._cap, math.floor(fits)))
        return tuple([rooms[row] for row in lineup.rows])

    def _generation(self, genome: Genome, tasks: Mapping[RlTask, CompactTask]) -> CompactTask | None:
        layout = genome.layouts[RlTask.ACTOR_GENERATION]
        training = tasks[RlTask.ACTOR_TRAINING]
        in_place = layout.gpus == genome.layouts[RlTask.ACTOR_TRAINING].gpus and (layout.pp, layout.tp) == (
            training.pp,
            training.tp,
        )
        even = self._even(RlTask.ACTOR_GENERATION, layout, training.layers if in_place else None)
        if even is None or not self.balancing.generation_samples or even.dp == 1:
            return even
        group = genome.grouping[genome.group_of(RlTask.ACTOR_GENERATION)]
        members = {task: even if task is RlTask.ACTOR_GENERATION else tasks[task] for task in group}
        rooms = self.evaluator.memory.decode_rooms(group, members)
        key = (even, rooms)
        found = self._decoding.get(key)
        if found is None:
            lineup = self.evaluator.lineup(even)
            samples = self._samples(RlTask.ACTOR_GENERATION, lineup, even.layers, rooms)
            found = even if samples == even.samples else even.with_samples(samples)
            self._decoding.put(key, found)
        return found

    def _samples(
        self, task: RlTask, lineup: Lineup, layers: tuple[int, ...], rooms: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Return samples per replica in proportion to speed; the even ones where all are equally fast."""
        if len(lineup.rows) == 1:
            return (self._total,)
        key = (self.evaluator.pricer_of(task), lineup, layers, rooms)
        found = self._shares.get(key)
        if found is None:
            found = self._share(task, lineup, layers, rooms)
            self._shares.put(key, found)
        return found

    def _share(self, task: RlTask, lineup: Lineup, layers: tuple[int, ...], rooms: tuple[int, ...]) -> tuple[int, ...]:
        rates, tp = self._rates[task], lineup.tp
        places = list(zip(lineup.rows, rooms or (1,) * len(lineup.rows), strict=True))
        distinct = dict.fromkeys(places)
        if len(distinct) == 1:
            return self._even_samples(len(places))
        units = {place: rates.unit_s(place[0], layers, tp, max(1, place[1])) for place in distinct}
        slowest = max(units.values())
        if slowest <= min(units.values()) * (1.0 + 1e-9) or not math.isfinite(slowest):
            return self._even_samples(len(lineup.rows))
        return share_samples(self._total, [units[place] for place in places])

    def _even_samples(self, dp: int) -> tuple[int, ...]:
        base, extra = divmod(self._total, dp)
        return (base + 1,) * extra + (base,) * (dp - extra)

    def _allows_uncached(self, task: RlTask, layout: TaskLayout) -> bool:
        return self._limits.allows(task, layout, self.evaluator.view)

    def _micro_batch(self, task: RlTask) -> int:
        """Return the micro-batch size of a task: the job's for training, 1 elsewhere."""
        return self.evaluator.job.training.micro_batch_size if task.kind is TaskKind.TRAINING else 1

    def _even_uncached(self, task: RlTask, layout: TaskLayout, layers: tuple[int, ...] | None) -> CompactTask | None:
        """Return the placement with equal samples; `layers` overrides the split."""
        if layout.dp > self._total:
            return None
        lineup = self.evaluator.lineups.of(layout.gpus, layout.pp, layout.tp)
        if layers is None:
            layers = self._rates[task].layers_of(lineup, layout.split if self.balancing.layers else LayerSplit.EVEN)
        if layers is None:
            return None
        placement = CompactTask(
            read_only_grid(layout.gpus, layout.dp, layout.pp, layout.tp),
            layers,
            self._even_samples(layout.dp),
            self._micro_batch(task),
        )
        placement.keep_lineup(self.evaluator.lineups, lineup)
        return placement

    def _balanced_uncached(self, task: RlTask, layout: TaskLayout) -> CompactTask | None:
        even = self._even_uncached(task, layout, None)
        if even is None or not self.balancing.other_samples:
            return even
        samples = self._samples(task, self.evaluator.lineup(even), even.layers)
        return even if samples == even.samples else even.with_samples(samples)
