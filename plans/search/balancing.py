"""Load balancing inside plan evaluation: layers per stage and samples per replica of a layout (HetRL section 4.4).

The strategies are those of `plans.balance`; here they are applied with the linear unit costs of the cost model in array
form, because a search does it for every layout it prices. Lengths are equal for the analytic model, so strategy (b)
amounts to sample counts in proportion to speed. Unit costs only steer the shares: the price is the evaluator's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from plans.balance import balance_layers, proportional_shares
from plans.cost.cache import BoundedCache, entries_for
from plans.cost.compact import GpuGrid
from plans.cost.evaluator import PlanEvaluator
from plans.cost.lineup import Lineup, Row, Site
from plans.errors import InfeasibleError
from plans.memory import TaskMemory
from plans.search.layouts import LayerSplit
from plans.workflow import RlTask

#: Layer splits kept per task.
SPLITS_KEPT = 20_000

KindRows = frozenset[tuple[int, ...]]
"""Distinct rows of a lineup, each stage given as the number of what matters of its site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancing:
    """Which strategies are used (for ablations)."""

    generation_samples: bool = True
    """Strategy (a): samples over the replicas of generation."""
    other_samples: bool = True
    """Strategy (b): samples over the replicas of the other tasks."""
    layers: bool = True
    """Strategy (c): layers over pipeline stages."""

    @classmethod
    def none(cls) -> Balancing:
        """Return even shares everywhere."""
        return cls(generation_samples=False, other_samples=False, layers=False)


class TaskRates:
    """Layer splits and unit costs of the layouts of one task; what it keeps changes no result."""

    def __init__(self, evaluator: PlanEvaluator, task: RlTask, micro_batch_size: int) -> None:
        """Read the task's constants."""
        view = evaluator.view
        self._num_layers = evaluator.terms[task].num_layers
        self._pricer = evaluator.pricer_of(task)
        self._memory = TaskMemory(evaluator.job, task)
        self._lineups = evaluator.lineups
        first = view.machine_of.searchsorted(range(len(view.machine_names)))
        self._capacity: list[float] = (view.memory_bytes - view.reserve_bytes)[first].tolist()
        self._mbs = micro_batch_size
        self._bytes: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._kinds: dict[int, _Kinds] = {}
        lineups = min(SPLITS_KEPT, entries_for(view.num_gpus))
        self._splits: BoundedCache[Hashable, tuple[int, ...] | None] = BoundedCache(SPLITS_KEPT)
        self._layers: BoundedCache[tuple[Lineup, LayerSplit], tuple[int, ...] | None] = BoundedCache(lineups)
        self._kinds_kept: BoundedCache[Lineup, KindRows] = BoundedCache(lineups)
        self._room_kept: BoundedCache[tuple[KindRows, int], list[float]] = BoundedCache(SPLITS_KEPT)

    def layers(self, grid: GpuGrid, split: LayerSplit) -> tuple[int, ...] | None:
        """Return layers per stage [pp] of a placement [dp, pp, tp]; None where no split fits memory or layers."""
        return self.layers_of(self._lineup(grid), split)

    def layers_of(self, lineup: Lineup, split: LayerSplit) -> tuple[int, ...] | None:
        """Return layers per stage [pp] of a lineup; None where no split fits memory or layers."""
        key = (lineup, split)
        found = self._layers.get(key, ())
        if found == ():
            found = self._layers_of_kinds(lineup, split)
            self._layers.put(key, found)
        return found

    def _layers_of_kinds(self, lineup: Lineup, split: LayerSplit) -> tuple[int, ...] | None:
        if lineup.pp == 1:
            return (self._num_layers,)
        if lineup.pp > self._num_layers:
            return None
        kinds = self._kinds_of(lineup)
        key = (kinds, lineup.tp, len(lineup.rows), split)
        found = self._splits.get(key, ())
        if found == ():
            found = self._split(kinds, lineup.tp, len(lineup.rows), split)
            self._splits.put(key, found)
        return found

    def resident_share(self, grid: GpuGrid, layers: Sequence[int]) -> float:
        """Return the largest share of a GPU's memory that its shard of the model fills."""
        return self.share_of(self._lineup(grid), layers)

    def share_of(self, lineup: Lineup, layers: Sequence[int]) -> float:
        """Return the largest share of a GPU's memory that its shard of the model fills, for a lineup."""
        per_layer, first, last = self._resident(lineup.tp, len(lineup.rows))
        held = [count * per_layer for count in layers]
        held[0] += first
        held[-1] += last
        room = self._room(self._kinds_of(lineup), lineup.tp)
        return max([amount / capacity for amount, capacity in zip(held, room, strict=True)])

    def unit_s(self, row: Row, layers: tuple[int, ...], tp: int, room: int = 1) -> float:
        """Return seconds per sample of a replica: with many samples, and so many decoded together."""
        return self._pricer.unit_s(row, layers, self._mbs, tp, room)

    def _lineup(self, grid: GpuGrid) -> Lineup:
        return self._lineups.of(grid.reshape(-1).tolist(), grid.shape[1], grid.shape[2])

    def _split(self, kinds: KindRows, tp: int, dp: int, split: LayerSplit) -> tuple[int, ...] | None:
        total, numbered = self._num_layers, self._kinds[tp].found
        rows = [[numbered[number] for number in row] for row in kinds]
        stages = len(rows[0])
        room = self._room(kinds, tp).copy()
        if split is LayerSplit.EVEN:
            return proportional_shares(total, [1.0] * stages)
        if split is LayerSplit.MEMORY:
            return proportional_shares(total, room)
        relative, head = [0.0] * stages, 0.0
        for row in rows:
            mean = sum([kind.layer_s for kind in row]) / stages
            if not math.isfinite(mean):  # a TP group over a forbidden link: no split helps
                return proportional_shares(total, [1.0] * stages)
            relative = [max(most, kind.layer_s / mean) for most, kind in zip(relative, row, strict=True)]
            head = max(head, row[-1].head_s / mean)
        per_layer, first, last = self._resident(tp, dp)
        room[0] -= first
        room[-1] -= last
        try:
            caps = [max(1, math.floor(value / per_layer)) for value in room]
            return balance_layers(total, relative, fixed_s=[0.0] * (stages - 1) + [head], caps=caps)
        except InfeasibleError:
            return None

    def _kinds_of(self, lineup: Lineup) -> KindRows:
        """Return the distinct rows of the lineup with machines replaced by the numbers of their kinds."""
        found = self._kinds_kept.get(lineup)
        if found is None:
            kinds = self._kinds.get(lineup.tp)
            if kinds is None:
                kinds = self._kinds[lineup.tp] = _Kinds(partial(self._kind, lineup.tp))
            found = frozenset([tuple(map(kinds.__getitem__, row)) for row in lineup.distinct])
            self._kinds_kept.put(lineup, found)
        return found

    def _room(self, kinds: KindRows, tp: int) -> list[float]:
        """Return the bytes that tasklets of each stage may use: those of its smallest GPU [pp]."""
        found = self._room_kept.get((kinds, tp))
        if found is None:
            capacity = [kind.capacity for kind in self._kinds[tp].found]
            found = [min([capacity[number] for number in set(column)]) for column in zip(*kinds, strict=True)]
            self._room_kept.put((kinds, tp), found)
        return found

    def _kind(self, tp: int, site: Site) -> _Kind:
        places = (site,) if isinstance(site, int) else site
        capacity = min([self._capacity[machine] for machine in places])
        return _Kind(*self._pricer.shares_s(site, self._mbs, tp), capacity)

    def _resident(self, tp: int, dp: int) -> tuple[float, float, float]:
        """Return resident bytes per layer, and the extra of the first and the last stage."""
        found = self._bytes.get((tp, dp))
        if found is None:
            memory = self._memory
            one = memory.model_bytes(1, is_first=False, is_last=False, tp=tp, dp=dp)
            first = memory.model_bytes(1, is_first=True, is_last=False, tp=tp, dp=dp) - one
            last = memory.model_bytes(1, is_first=False, is_last=True, tp=tp, dp=dp) - one
            found = self._bytes[tp, dp] = (one, first, last)
        return found


class _Kind(NamedTuple):
    """What of a stage's site decides its layers."""

    layer_s: float
    """Rough seconds per layer and sample."""
    head_s: float
    """Rough seconds of the vocabulary head per sample; 0 in paper mode."""
    capacity: float
    """Bytes that tasklets may use on each of its GPUs."""


class _Kinds(dict[Site, int]):
    """Number of the kind of each site at one TP degree, worked out when it is first asked for."""

    def __init__(self, kind_of: Callable[[Site], _Kind]) -> None:
        super().__init__()
        self._kind_of = kind_of
        self.found: list[_Kind] = []
        """Kinds by number."""

    def __missing__(self, site: Site) -> int:
        kind = self._kind_of(site)
        if kind not in self.found:
            self.found.append(kind)
        number = self[site] = self.found.index(kind)
        return number


def share_samples(total: int, unit_s: Sequence[float]) -> tuple[int, ...]:
    """Return samples per replica that minimise the largest `samples * unit_s`, each at least 1.

    Floors of the proportional shares, then one sample at a time to the replica that would finish first: exact for
    linear costs. Equally fast replicas are served together, the first of them first; `total` >= replicas.
    """
    classes = Counter(unit_s)
    rate = math.fsum([count / seconds for seconds, count in classes.items()])
    held = {s: count * max(1, math.floor(total / (s * rate) + 1e-9)) for s, count in classes.items()}
    left = total - sum(held.values())
    while left > 0:
        chosen = min(classes, key=lambda seconds: (held[seconds] // classes[seconds] + 1) * seconds)
        given = min(left, classes[chosen] - held[chosen] % classes[chosen])
        held[chosen] += given
        left -= given
    while left < 0:
        # Lifting slow replicas to one sample took too many: the slowest of the others give them back.
        able = [seconds for seconds, count in classes.items() if held[seconds] > count]
        chosen = max(able, key=lambda seconds: -(-held[seconds] // classes[seconds]) * seconds)
        taken = min(-left, (held[chosen] - 1) % classes[chosen] + 1, held[chosen] - classes[chosen])
        held[chosen] -= taken
        left += taken
    members = {seconds: _members(held[seconds], count) for seconds, count in classes.items()}
    return tuple([next(members[seconds]) for seconds in unit_s])


def _members(held: int, count: int) -> Iterator[int]:
    """Yield the samples of each replica of a class."""
    base, extra = divmod(held, count)
    return iter([base + 1] * extra + [base] * (count - extra))
