"""Levels 4 and 5 of the search for one task: parallel degrees and the GPU of each tasklet, and good guesses at them.

The guesses (extension of HetRL, which starts from random ones) keep tensor parallelism inside a machine and lay
replicas and stages along the machine order, in three ways: a replica is a block of near machines (pipelines stay
local, gradients travel), a stage is a block (gradients stay local, activations travel), or the slowest GPUs are the
ends of pipelines that are blocks otherwise (each replica gets as many). Slow GPU types or distant regions may be left
out. Which guess is good is for the cost model to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from plans.search.degrees import pp_degrees, tp_degrees
from plans.search.machine_order import MachineOrder
from plans.search.seeds import Draws
from plans.spec.cluster import IntArray
from plans.spec.llm import LlmShape
from plans.workflow import TaskKind

if TYPE_CHECKING:  # limits are about layouts
    from plans.search.limits import TaskLimit


class LayerSplit(StrEnum):
    """How layers are shared out over pipeline stages."""

    SPEED = "speed"
    """So that the slowest stage is as fast as possible."""
    MEMORY = "memory"
    """In proportion to the memory of the stages' GPUs."""
    EVEN = "even"
    """Evenly."""


class Arrangement(StrEnum):
    """How units of TP GPUs become replicas and stages."""

    REPLICA_BLOCKS = "replica_blocks"
    STAGE_BLOCKS = "stage_blocks"
    SLOW_ENDS = "slow_ends"
    """The slowest GPUs, equally many to each replica, at both ends of its pipeline; the others as replica blocks."""


class Recipe(NamedTuple):
    """Coordinates of a guess."""

    subset: int
    """Index into the task's candidate subsets of the group's GPUs; 0 = all of them."""
    tp: int
    """Tensor-parallel degree."""
    pp: int
    """Pipeline degree; DP uses what is left."""
    by_type: bool
    """Order machines by GPU type before region."""
    arrangement: Arrangement
    """Replica or stage blocks."""


@dataclass(frozen=True, slots=True)
class TaskLayout:
    """Degrees and placement of one task, by GPU index."""

    dp: int
    """Replicas."""
    pp: int
    """Stages per replica."""
    tp: int
    """Shards per stage."""
    gpus: tuple[int, ...]
    """GPU of each tasklet: replica by replica, stage by stage, shard by shard (dp * pp * tp of them)."""
    split: LayerSplit = LayerSplit.SPEED
    """How layers are shared out; matters with pp > 1 and unlike GPUs only."""
    recipe: Recipe | None = field(default=None, compare=False)
    """The guess that it came from, for doing the same on other GPUs; None = drawn or changed."""
    _array: IntArray | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def array(self) -> IntArray:
        """The GPUs as an array."""
        array = self._array
        if array is None:
            array = np.array(self.gpus, dtype=np.int64)
            object.__setattr__(self, "_array", array)
        return array


Unit = tuple[int, ...]

_ARRANGEMENTS = tuple(Arrangement)

#: About how many pipeline degrees are offered per set of units, beside those that divide their number.
MOST_PP = 12


class LayoutGuesses:
    """Guesses at layouts of one task on one set of GPUs."""

    def __init__(
        self,
        order: MachineOrder,
        kind: TaskKind,
        shape: LlmShape,
        gpus: Sequence[int],
        *,
        least_shards: int,
        limit: TaskLimit | None = None,
    ) -> None:
        """Read the GPUs' machines and speeds.

        Args:
            order: order of the machines.
            kind: what the task does.
            shape: its model.
            gpus: GPUs that it may use.
            least_shards: smallest pp * tp at which a shard of the model can fit a GPU.
            limit: what the task's engine can run; None = anything.
        """
        self._order, self._kind, self._shape, self._least_shards = order, kind, shape, least_shards
        self._limit = limit
        view = order.view
        self._machine: list[int] = view.machine_of[list(gpus)].tolist()
        self._where = dict(zip(gpus, self._machine, strict=True))
        self._types = {gpu: view.type_names[int(view.type_of[gpu])] for gpu in gpus} if limit is not None else {}
        self._region = {m: int(view.region_of_machine[m]) for m in set(self._machine)}
        speed = order.hbm if kind is TaskKind.GENERATION else order.compute
        self._speed = {m: float(speed[m]) for m in self._region}
        self.subsets = self._find_subsets(tuple(gpus))
        self._units: dict[tuple[int, int, bool], list[Unit]] = {}
        self._ranks: dict[tuple[int, int, bool], list[int]] = {}
        self._pps: dict[tuple[int, int], tuple[int, ...]] = {}
        self._tps: dict[int, tuple[int, ...]] = {}

    def recipes(self, *, deep: bool = False) -> list[Recipe]:
        """Return the plain recipes: all GPUs, near order; every TP, PP by powers of two, replica blocks.

        Deep: every PP on offer and all arrangements.
        """
        arrangements = tuple(Arrangement) if deep else (Arrangement.REPLICA_BLOCKS,)
        found: list[Recipe] = []
        for tp in self.tps(0):
            count = len(self.units(0, tp, by_type=False))
            offered = self.pps(tp, count)
            found += [
                Recipe(subset=0, tp=tp, pp=pp, by_type=False, arrangement=arrangement)
                for arrangement in arrangements
                for pp in offered
                if deep or pp & (pp - 1) == 0 or pp == offered[0]
            ]
        return found

    def variations(self, recipe: Recipe) -> list[Recipe]:
        """Return the recipes that differ in one coordinate."""
        found = [recipe._replace(arrangement=arrangement) for arrangement in Arrangement]
        found.append(recipe._replace(by_type=not recipe.by_type))
        found += [recipe._replace(subset=index) for index in range(len(self.subsets))]
        found += [recipe._replace(tp=tp) for tp in self.tps(recipe.subset)]
        pps = self.pps(recipe.tp, len(self.units(recipe.subset, recipe.tp, by_type=recipe.by_type)))
        if recipe.pp in pps:
            at = pps.index(recipe.pp)
            found += [recipe._replace(pp=pp) for pp in pps[max(0, at - 2) : at + 3]]
        return [other for other in dict.fromkeys(found) if other != recipe]

    def random_recipe(self, rng: Draws) -> Recipe:
        """Return a recipe drawn evenly, coordinate by coordinate."""
        subset = rng.below(len(self.subsets))
        by_type = rng.random() < 0.5
        tps = self.tps(subset)
        tp = tps[rng.below(len(tps))]
        pps = self.pps(tp, len(self.units(subset, tp, by_type=by_type)))
        pp = pps[rng.below(len(pps))]
        arrangement = _ARRANGEMENTS[rng.below(len(_ARRANGEMENTS))]
        return Recipe(subset=subset, tp=tp, pp=pp, by_type=by_type, arrangement=arrangement)

    def build(self, recipe: Recipe) -> TaskLayout | None:
        """Return the layout of a recipe, or None where the GPUs do not allow its degrees."""
        if recipe.subset >= len(self.subsets):
            return None
        units = self.units(recipe.subset, recipe.tp, by_type=recipe.by_type)
        tp, pp = recipe.tp, recipe.pp
        if pp > len(units) or pp * tp < self._least_shards or pp > self._shape.layers:
            return None
        dp = len(units) // pp
        if recipe.arrangement is Arrangement.SLOW_ENDS:
            return self._with_slow_ends(recipe, units, dp)
        chosen = units if dp * pp == len(units) else self._strongest(recipe, units, dp * pp)
        if recipe.arrangement is Arrangement.STAGE_BLOCKS:
            if dp == 1 or pp == 1:
                return None
            chosen = [chosen[stage * dp + replica] for replica in range(dp) for stage in range(pp)]
        gpus = tuple([gpu for unit in chosen for gpu in unit])
        return TaskLayout(dp, pp, tp, gpus, recipe=recipe)

    def _with_slow_ends(self, recipe: Recipe, units: Sequence[Unit], dp: int) -> TaskLayout | None:
        """Return the layout whose pipelines begin and end on the slowest kind of GPU.

        None where the units are of one kind, or where the slowest ones are too few for each replica to have one.
        """
        least = min(self._speed[self._where[unit[0]]] for unit in units)
        slow = [unit for unit in units if self._speed[self._where[unit[0]]] == least]
        fast = [unit for unit in units if self._speed[self._where[unit[0]]] > least]
        ends = max(len(slow) // dp, recipe.pp - len(fast) // dp)
        inner = recipe.pp - ends
        if not ends or inner < 1 or ends * dp > len(slow):
            return None
        front = ends // 2
        gpus: list[int] = []
        for replica in range(dp):
            outside = slow[replica * ends : (replica + 1) * ends]
            inside = fast[replica * inner : (replica + 1) * inner]
            for unit in (*outside[:front], *inside, *outside[front:]):
                gpus.extend(unit)
        return TaskLayout(dp, recipe.pp, recipe.tp, tuple(gpus), recipe=recipe)

    def tps(self, subset: int) -> tuple[int, ...]:
        """Return the TP degrees that fit a machine, largest first."""
        found = self._tps.get(subset)
        if found is None:
            found = self._tps[subset] = self._find_tps(subset)
        return found

    def _find_tps(self, subset: int) -> tuple[int, ...]:
        counts: dict[int, int] = {}
        for gpu in self.subsets[subset]:
            counts[self._where[gpu]] = counts.get(self._where[gpu], 0) + 1
        offered = tuple(reversed(tp_degrees(self._shape, max(counts.values()))))
        limit = self._limit
        if limit is None or limit.most_tp is None:
            return offered
        is_free = all(self._types[gpu] in limit.thread_types for gpu in self.subsets[subset])
        return offered if is_free else tuple(tp for tp in offered if tp <= limit.most_tp)

    def pps(self, tp: int, num_units: int) -> tuple[int, ...]:
        """Return the PP degrees whose shards can fit a GPU, least first: some, and all that leave no unit idle."""
        found = self._pps.get((tp, num_units))
        if found is None:
            found = self._pps[tp, num_units] = self._find_pps(tp, num_units)
        return found

    def _find_pps(self, tp: int, num_units: int) -> tuple[int, ...]:
        exact = (pp for pp in pp_degrees(self._shape, num_units) if num_units % pp == 0)
        offered = tuple(sorted({*pp_degrees(self._shape, num_units, most=MOST_PP), *exact}))
        if self._limit is not None and self._limit.most_pp is not None:
            offered = tuple(pp for pp in offered if pp <= self._limit.most_pp)
        enough = tuple(pp for pp in offered if pp * tp >= self._least_shards)
        return enough or offered[-1:]

    def units(self, subset: int, tp: int, *, by_type: bool) -> list[Unit]:
        """Return sets of `tp` GPUs of one machine along the machine order; GPUs left over are not used."""
        key = (subset, tp, by_type)
        if key not in self._units:
            self._units[key] = self._make_units(self.subsets[subset], tp, by_type=by_type)
        return self._units[key]

    def _make_units(self, subset: Sequence[int], tp: int, *, by_type: bool) -> list[Unit]:
        per_machine: dict[int, list[int]] = {}
        for gpu in subset:
            per_machine.setdefault(self._where[gpu], []).append(gpu)
        chain, regions, compute = self._order.chain_rank, self._order.region_chain_rank, self._order.compute

        def place(machine: int) -> tuple[float, ...]:
            region, strength = float(regions[self._region[machine]]), -float(compute[machine])
            return (strength, region, chain[machine]) if by_type else (region, strength, chain[machine])

        return [
            tuple(per_machine[machine][start : start + tp])
            for machine in sorted(per_machine, key=place)
            for start in range(0, len(per_machine[machine]) - tp + 1, tp)
        ]

    def _strongest(self, recipe: Recipe, units: Sequence[Unit], count: int) -> list[Unit]:
        """Return `count` units, the slowest left out, in the given order."""
        key = (recipe.subset, recipe.tp, recipe.by_type)
        ranked = self._ranks.get(key)
        if ranked is None:
            speed = [-self._speed[self._where[unit[0]]] for unit in units]
            ranked = self._ranks[key] = sorted(range(len(units)), key=speed.__getitem__)
        return [units[i] for i in sorted(ranked[:count])]

    def _find_subsets(self, gpus: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return all GPUs, then without the slowest types, then the strongest regions alone.

        Where the task must stay on one machine: the machines, the strongest first.
        """
        if self._limit is not None and self._limit.is_on_one_machine:
            return self._machines(gpus)
        subsets = {gpus: None}
        speed = {gpu: self._speed[machine] for gpu, machine in self._where.items()}
        kinds = sorted(set(speed.values()), reverse=True)
        for count in range(len(kinds) - 1, 0, -1):
            subsets.setdefault(tuple(gpu for gpu in gpus if speed[gpu] >= kinds[count - 1]))
        by_region: dict[int, list[int]] = {}
        for gpu in gpus:
            by_region.setdefault(self._region[self._where[gpu]], []).append(gpu)
        regions = sorted(by_region.values(), key=lambda members: -sum(speed[gpu] for gpu in members))
        total = sum(speed.values())
        for members in regions[:2]:
            if sum(speed[gpu] for gpu in members) * 4.0 >= total:
                subsets.setdefault(tuple(members))
        return list(subsets)

    def _machines(self, gpus: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the GPUs of each machine, the strongest machine first."""
        members: dict[int, list[int]] = {}
        for gpu in gpus:
            members.setdefault(self._where[gpu], []).append(gpu)
        ranked = sorted(members, key=lambda machine: (-self._speed[machine] * len(members[machine]), machine))
        return [tuple(members[machine]) for machine in ranked]
