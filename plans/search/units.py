"""Units of tensor parallelism: GPUs of one machine that work on the same layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plans.spec.cluster import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Units:
    """Sets of `tp` GPUs of one machine, machines in some order; what a machine has left over is not used."""

    gpus: IntArray
    """GPUs of the units, one unit after the other [units * tp]."""
    speeds: FloatArray
    """Speed of a GPU of each unit [units]."""

    @classmethod
    def cut(cls, blocks: Sequence[IntArray], speeds: Sequence[float], tp: int) -> Units:
        """Return the units of some machines.

        Args:
            blocks: GPUs of each machine.
            speeds: speed of one GPU of each machine.
            tp: GPUs per unit.
        """
        counts = [len(block) // tp for block in blocks]
        used = [block[: count * tp] for block, count in zip(blocks, counts, strict=True)]
        return cls(np.concatenate(used), np.repeat(speeds, counts))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.speeds)
