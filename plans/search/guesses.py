"""Good guesses at layouts of one task (extension of HetRL, which starts from random ones).

They keep tensor parallelism inside a machine and lay replicas and stages along the machine order, in three ways: a
replica is a block of near machines (pipelines stay local, gradients travel), a stage is a block (gradients stay local,
activations travel), or the slowest GPUs are the ends of pipelines that are blocks otherwise (each replica gets as
many). Slow GPU types or distant regions may be left out. Which guess is good is for the cost model to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from plans.cost.compiled.tables import FloatVector, IntArray, IntMatrix, IntVector
from plans.search.degrees import offered_pp_degrees, tp_degrees
from plans.search.layouts import Arrangement, Recipe, TaskLayout
from plans.search.machine_order import MachineOrder
from plans.search.seeds import Draws
from plans.spec.llm import LlmShape
from plans.workflow import TaskKind

if TYPE_CHECKING:  # limits are about layouts
    from plans.search.limits import TaskLimit

#: In the order of their numbers in `plans.search.compiled.layouts`.
ARRANGEMENTS = (Arrangement.REPLICA_BLOCKS, Arrangement.STAGE_BLOCKS, Arrangement.SLOW_ENDS)


class Choices(NamedTuple):
    """What a set of GPUs allows, for machine code; m = its machines, G = its GPUs, S = subsets of its machines."""

    gpus: IntMatrix
    """GPUs machine by machine, near machines side by side; the same with GPU types side by side [2, G]."""
    machines: IntMatrix
    """Machine of each of them, counted from 0 [2, G]."""
    speeds: FloatVector
    """Speed of a GPU of each machine [m]."""
    subsets: IntMatrix
    """Whether a subset has a machine: 0 or 1 [S, m]."""
    tps: IntMatrix
    """TP degrees that fit a machine of a subset, largest first, then 0 [S, most]."""
    pps: IntMatrix
    """PP degrees on offer by number of units, least first, then 0 [most units + 1, most]."""
    bounds: IntVector
    """Layers of the model, and the smallest pp * tp at which a shard can fit a GPU [2]."""


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
        # Machine code is loaded when somebody searches, not when the package is imported.
        from plans.cost.compiled.words import words_of
        from plans.search.compiled.recipes import build_recipe

        self._words_of, self._build_recipe = words_of, build_recipe
        self._order, self._shape, self._least_shards, self._limit = order, shape, least_shards, limit
        self._num_gpus = len(gpus)
        members: dict[int, list[int]] = {}
        for gpu, machine in zip(gpus, order.view.machine_of[list(gpus)].tolist(), strict=True):
            members.setdefault(machine, []).append(gpu)
        self._blocks = members
        speed = order.hbm if kind is TaskKind.GENERATION else order.compute
        self._speed = {machine: float(speed[machine]) for machine in members}
        self.subsets = self._find_subsets()
        self._tps: dict[int, tuple[int, ...]] = {}

    @cached_property
    def words(self) -> IntArray:
        """The words of the choices, for machine code."""
        return self._words_of(self.choices)

    @cached_property
    def choices(self) -> Choices:
        """What the GPUs allow."""
        number = {machine: index for index, machine in enumerate(self._blocks)}
        orders = [sorted(self._blocks, key=rank.__getitem__) for rank in (self._order.near_rank, self._order.type_rank)]
        placed = [[(gpu, number[machine]) for machine in order for gpu in self._blocks[machine]] for order in orders]
        pairs = np.array(placed, dtype=np.int64)
        tps = [self.tps(subset) for subset in range(len(self.subsets))]
        most = max(map(len, tps))
        return Choices(
            gpus=np.ascontiguousarray(pairs[:, :, 0]),
            machines=np.ascontiguousarray(pairs[:, :, 1]),
            speeds=np.array(list(self._speed.values())),
            subsets=np.array([[machine in subset for machine in number] for subset in self.subsets], dtype=np.int64),
            tps=np.array([(*found, *[0] * (most - len(found))) for found in tps], dtype=np.int64),
            pps=offered_degrees(self._shape, len(self._order.view.machine_of), self._most_pp),
            bounds=np.array([self._shape.layers, self._least_shards], dtype=np.int64),
        )

    @property
    def _most_pp(self) -> int | None:
        return None if self._limit is None else self._limit.most_pp

    def random_recipe(self, rng: Draws) -> Recipe:
        """Return a recipe drawn evenly, coordinate by coordinate."""
        subset = rng.below(len(self.subsets))
        by_type = rng.random() < 0.5
        tps = self.tps(subset)
        tp = tps[rng.below(len(tps))]
        pps = self.pps(tp, self.count_units(subset, tp))
        pp = pps[rng.below(len(pps))]
        arrangement = ARRANGEMENTS[rng.below(len(ARRANGEMENTS))]
        return Recipe(subset, tp, pp, by_type, arrangement)

    def build(self, recipe: Recipe) -> TaskLayout | None:
        """Return the layout of a recipe, or None where the GPUs do not allow its degrees."""
        subset, tp, pp, by_type, arrangement = recipe
        row = np.array((subset, tp, pp, by_type, ARRANGEMENTS.index(arrangement)), dtype=np.int64)
        gpus = np.empty(self._num_gpus, dtype=np.int64)
        dp = self._build_recipe(self.words, row, gpus)
        return TaskLayout.of_array(dp, pp, tp, gpus[: dp * pp * tp], recipe) if dp else None

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
        offered = _offered(self._shape, num_units, self._most_pp)
        return tuple(pp for pp in offered if pp * tp >= self._least_shards) or offered[-1:]

    def count_units(self, subset: int, tp: int) -> int:
        """Return how many sets of `tp` GPUs of one machine a subset has."""
        return sum(len(self._blocks[machine]) // tp for machine in self.subsets[subset])

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


@lru_cache(maxsize=256)
def offered_degrees(shape: LlmShape, most_units: int, most_pp: int | None) -> IntArray:
    """Return PP degrees by number of units, least first, then 0 [most_units + 1, most]; `most_pp`: None = no limit."""
    rows = [_offered(shape, num_units, most_pp) for num_units in range(most_units + 1)]
    most = max(map(len, rows))
    return np.array([(*row, *[0] * (most - len(row))) for row in rows], dtype=np.int64)


def _offered(shape: LlmShape, num_units: int, most_pp: int | None) -> tuple[int, ...]:
    offered = offered_pp_degrees(shape, num_units)
    return offered if most_pp is None else tuple(pp for pp in offered if pp <= most_pp)
