"""Layouts of recipes: how units of TP GPUs along the machine order become replicas and stages (`plans.search.guesses`).

Units lie one after the other, `tp` GPUs each; the answers are GPUs replica by replica, stage by stage, shard by shard.
"""

from __future__ import annotations

import math

import numpy as np

from plans.cost.compiled.arrays import least_of
from plans.cost.compiled.jit import inner
from plans.cost.compiled.tables import FloatArray, IntArray

#: Numbers of the arrangements (`plans.search.layouts.Arrangement`).
REPLICA_BLOCKS, STAGE_BLOCKS, SLOW_ENDS = range(3)


@inner
def lay_out(units: IntArray, speeds: FloatArray, pp: int, tp: int, arrangement: int, gpus: IntArray) -> int:
    """Write the GPUs of as many replicas as the units allow; return their number, 0 where there is no such layout.

    Args:
        units: GPUs of the units [units * tp].
        speeds: speed of each unit.
        pp: stages per replica.
        tp: GPUs per unit.
        arrangement: how units become replicas and stages.
        gpus: the answer; at least as long as `units`.
    """
    dp = len(speeds) // pp
    if dp == 0 or (arrangement == STAGE_BLOCKS and (dp == 1 or pp == 1)):
        return 0
    order = np.empty(dp * pp, dtype=np.int64)
    if arrangement == SLOW_ENDS:
        if not _slow_ends(speeds, dp, pp, order):
            return 0
    else:
        _strongest(speeds, order)
    for place in range(dp * pp):
        unit = order[place % pp * dp + place // pp] if arrangement == STAGE_BLOCKS else order[place]
        for rank in range(tp):
            gpus[place * tp + rank] = units[unit * tp + rank]
    return dp


@inner
def _strongest(speeds: FloatArray, chosen: IntArray) -> None:
    """Write as many units as `chosen` holds, the slowest left out, in order; the first of equally fast ones."""
    left, fastest = len(chosen), math.inf
    while True:
        # The next slower kind of unit.
        kind, members = -math.inf, 0
        for speed in speeds:
            if speed < fastest and speed > kind:
                kind, members = speed, 1
            elif speed == kind:
                members += 1
        if members >= left:
            break
        left -= members
        fastest = kind
    at = 0
    for unit in range(len(speeds)):
        if speeds[unit] > kind or (speeds[unit] == kind and left > 0):
            left -= speeds[unit] == kind
            chosen[at] = unit
            at += 1


@inner
def _slow_ends(speeds: FloatArray, dp: int, pp: int, order: IntArray) -> bool:
    """Write the units of pipelines [dp * pp] that begin and end on the slowest kind and are blocks otherwise.

    False where the units are of one kind, or where the slowest ones are too few for each replica to have one.
    """
    slowest, slow, fast = least_of(speeds), 0, 0
    for speed in speeds:
        slow += speed == slowest
    ends = max(slow // dp, pp - (len(speeds) - slow) // dp)
    inner = pp - ends
    if ends == 0 or inner < 1 or ends * dp > slow:
        return False
    front, slow = ends // 2, 0
    for unit in range(len(speeds)):
        if speeds[unit] == slowest:
            replica, place = slow // ends, slow % ends
            slow += 1
            stage = place if place < front else place + inner
        else:
            replica, stage = fast // inner, front + fast % inner
            fast += 1
        if replica < dp:
            order[replica * pp + stage] = unit
    return True
