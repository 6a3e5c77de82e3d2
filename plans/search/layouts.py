"""Levels 4 and 5 of the search for one task: parallel degrees and the GPU of each tasklet."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from plans.spec.cluster import IntArray


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

    @classmethod
    def of_array(cls, dp: int, pp: int, tp: int, gpus: IntArray, recipe: Recipe) -> TaskLayout:
        """Return the layout of a recipe, whose GPUs are an array [dp * pp * tp] that nobody changes."""
        layout = cls(dp, pp, tp, tuple(gpus.tolist()), recipe=recipe)
        object.__setattr__(layout, "_array", gpus)
        return layout

    @property
    def array(self) -> IntArray:
        """The GPUs as an array."""
        array = self._array
        if array is None:
            array = np.array(self.gpus, dtype=np.int64)
            object.__setattr__(self, "_array", array)
        return array
