"""Good guesses at layouts of one task (extension of HetRL, which starts from random ones).

They keep tensor parallelism inside a machine and lay replicas and stages along the machine order, in three ways: a
replica is a block of near machines (pipelines stay local, gradients travel), a stage is a block (gradients stay local,
activations travel), or the slowest GPUs are the ends of pipelines that are blocks otherwise (each replica gets as
many). Slow GPU types or distant regions may be left out. Which guess is good is for the cost model to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from plans.search.degrees import offered_pp_degrees, tp_degrees
from plans.search.layouts import Arrangement, Recipe, TaskLayout
from plans.search.machine_order import MachineOrder
from plans.search.seeds import Draws
from plans.search.units import Units
from plans.spec.llm import LlmShape
from plans.workflow import TaskKind

if TYPE_CHECKING:  # limits are about layouts
    from plans.search.limits import TaskLimit

#: In the order of their numbers in `plans.search.compiled.layouts`.
ARRANGEMENTS = (Arrangement.REPLICA_BLOCKS, Arrangement.STAGE_BLOCKS, Arrangement.SLOW_ENDS)


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
        self._order, self._shape, self._least_shards, self._limit = order, shape, least_shards, limit
        members: dict[int, list[int]] = {}
        for gpu, machine in zip(gpus, order.view.machine_of[list(gpus)].tolist(), strict=True):
            members.setdefault(machine, []).append(gpu)
        self._blocks = {machine: np.array(block, dtype=np.int64) for machine, block in members.items()}
        speed = order.hbm if kind is TaskKind.GENERATION else order.compute
        self._speed = {machine: float(speed[machine]) for machine in members}
        self.subsets = self._find_subsets()
        self._units: dict[tuple[int, int, bool], Units] = {}
        self._pps: dict[tuple[int, int], tuple[int, ...]] = {}
        self._tps: dict[int, tuple[int, ...]] = {}

    def recipes(self, *, deep: bool = False) -> list[Recipe]:
        """Return the plain recipes: all GPUs, near order; every TP, PP by powers of two, replica blocks.

        Deep: every PP on offer and all arrangements.
        """
        arrangements = ARRANGEMENTS if deep else (Arrangement.REPLICA_BLOCKS,)
        found: list[Recipe] = []
        for tp in self.tps(0):
            offered = self.pps(tp, self.units(0, tp, by_type=False).count)
            found += [
                Recipe(0, tp, pp, False, arrangement)
                for arrangement in arrangements
                for pp in offered
                if deep or pp & (pp - 1) == 0 or pp == offered[0]
            ]
        return found

    def variations(self, recipe: Recipe) -> Iterable[Recipe]:
        """Return the recipes that differ in one coordinate, each once."""
        subset, tp, pp, by_type, arrangement = recipe
        found = [Recipe(subset, tp, pp, by_type, other) for other in ARRANGEMENTS]
        found.append(Recipe(subset, tp, pp, not by_type, arrangement))
        found += [Recipe(other, tp, pp, by_type, arrangement) for other in range(len(self.subsets))]
        found += [Recipe(subset, other, pp, by_type, arrangement) for other in self.tps(subset)]
        pps = self.pps(tp, self.units(subset, tp, by_type=by_type).count)
        if pp in pps:
            at = pps.index(pp)
            found += [Recipe(subset, tp, other, by_type, arrangement) for other in pps[max(0, at - 2) : at + 3]]
        once = dict.fromkeys(found)
        once.pop(recipe, None)
        return once

    def random_recipe(self, rng: Draws) -> Recipe:
        """Return a recipe drawn evenly, coordinate by coordinate."""
        subset = rng.below(len(self.subsets))
        by_type = rng.random() < 0.5
        tps = self.tps(subset)
        tp = tps[rng.below(len(tps))]
        pps = self.pps(tp, self.units(subset, tp, by_type=by_type).count)
        pp = pps[rng.below(len(pps))]
        arrangement = ARRANGEMENTS[rng.below(len(ARRANGEMENTS))]
        return Recipe(subset, tp, pp, by_type, arrangement)

    def build(self, recipe: Recipe) -> TaskLayout | None:
        """Return the layout of a recipe, or None where the GPUs do not allow its degrees."""
        # Machine code is loaded when somebody searches, not when the package is imported.
        from plans.search.compiled.layouts import lay_out

        units = self.units_of(recipe)
        if units is None:
            return None
        tp, pp = recipe.tp, recipe.pp
        gpus = np.empty(len(units.gpus), dtype=np.int64)
        dp = lay_out(units.gpus, units.speeds, pp, tp, ARRANGEMENTS.index(recipe.arrangement), gpus)
        return TaskLayout.of_array(dp, pp, tp, gpus[: dp * pp * tp], recipe) if dp else None

    def units_of(self, recipe: Recipe) -> Units | None:
        """Return the units that a recipe lays out, or None where the GPUs do not allow its degrees."""
        if recipe.subset >= len(self.subsets):
            return None
        if recipe.pp * recipe.tp < self._least_shards or recipe.pp > self._shape.layers:
            return None
        units = self.units(recipe.subset, recipe.tp, by_type=recipe.by_type)
        return units if recipe.pp <= units.count else None

    def tps(self, subset: int) -> tuple[int, ...]:
        """Return the TP degrees that fit a machine, largest first."""
        found = self._tps.get(subset)
        if found is None:
            found = self._tps[subset] = self._find_tps(self.subsets[subset])
        return found

    def _find_tps(self, machines: Sequence[int]) -> tuple[int, ...]:
        offered = tuple(reversed(tp_degrees(self._shape, max(len(self._blocks[machine]) for machine in machines))))
        limit = self._limit
        if limit is None or limit.most_tp is None:
            return offered
        is_free = all(self._type_name(machine) in limit.thread_types for machine in machines)
        return offered if is_free else tuple(tp for tp in offered if tp <= limit.most_tp)

    def _type_name(self, machine: int) -> str:
        view = self._order.view
        return view.type_names[int(view.type_of[self._blocks[machine][0]])]

    def pps(self, tp: int, num_units: int) -> tuple[int, ...]:
        """Return the PP degrees whose shards can fit a GPU, least first: some, and all that leave no unit idle."""
        found = self._pps.get((tp, num_units))
        if found is None:
            found = self._pps[tp, num_units] = self._find_pps(tp, num_units)
        return found

    def _find_pps(self, tp: int, num_units: int) -> tuple[int, ...]:
        offered = offered_pp_degrees(self._shape, num_units)
        if self._limit is not None and self._limit.most_pp is not None:
            most = self._limit.most_pp
            offered = tuple(pp for pp in offered if pp <= most)
        enough = tuple(pp for pp in offered if pp * tp >= self._least_shards)
        return enough or offered[-1:]

    def units(self, subset: int, tp: int, *, by_type: bool) -> Units:
        """Return sets of `tp` GPUs of one machine along the machine order."""
        key = (subset, tp, by_type)
        found = self._units.get(key)
        if found is None:
            rank = self._order.type_rank if by_type else self._order.near_rank
            machines = sorted(self.subsets[subset], key=rank.__getitem__)
            blocks, speeds = self._blocks, self._speed
            found = self._units[key] = Units.cut([blocks[m] for m in machines], [speeds[m] for m in machines], tp)
        return found

    def _find_subsets(self) -> list[tuple[int, ...]]:
        """Return the machines of candidate subsets: all, then without the slowest types, then the strongest regions.

        Where the task must stay on one machine: the machines, the strongest first.
        """
        machines, speed = tuple(self._blocks), self._speed
        strength = {machine: speed[machine] * len(block) for machine, block in self._blocks.items()}
        if self._limit is not None and self._limit.is_on_one_machine:
            return [(machine,) for machine in sorted(machines, key=lambda machine: (-strength[machine], machine))]
        subsets = {machines: None}
        kinds = sorted(set(speed.values()), reverse=True)
        for slowest in kinds[-2::-1]:
            subsets.setdefault(tuple(machine for machine in machines if speed[machine] >= slowest))
        by_region: dict[int, list[int]] = {}
        region = self._order.view.region_of_machine
        for machine in machines:
            by_region.setdefault(int(region[machine]), []).append(machine)
        held = {where: sum(strength[machine] for machine in members) for where, members in by_region.items()}
        total = sum(held.values())
        for where in sorted(by_region, key=lambda where: -held[where])[:2]:
            if held[where] * 4.0 >= total:
                subsets.setdefault(tuple(by_region[where]))
        return list(subsets)
