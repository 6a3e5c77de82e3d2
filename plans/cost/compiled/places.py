"""What each stage of a task's replicas can do where it is placed: measured once per placement, read many times.

Balancing and pricing ask for the same few numbers of a stage again and again. A place is a stage of a replica; places
lie replica by replica, stage by stage, as the machines of their GPUs do.
"""

from __future__ import annotations

import math

from plans.cost.compiled.jit import inner
from plans.cost.compiled.rings import pair_s, ring_s, ring_steps
from plans.cost.compiled.tables import ACTIVATION_BYTES, FloatArray, IntArray, Tables

#: Columns of a place: rates of its slowest GPU, the longest overhead per layer and decode step, seconds of one TP
#: all-reduce of a micro-batch, seconds of a micro-batch's activations to the next stage (0 for the last one).
FLOP_PER_S, HBM_BYTES_PER_S, OVERHEAD_S, RING_S, PAIR_S, NUM_PLACE = range(6)


@inner
def measure_places(
    tables: Tables, task: int, machines: IntArray, dp: int, pp: int, tp: int, mbs: int, places: FloatArray
) -> None:
    """Write the places of a task.

    Args:
        tables: the constants.
        task: its row.
        machines: machine of each tasklet [dp * pp * tp].
        dp: replicas.
        pp: stages per replica.
        tp: shards per stage.
        mbs: samples per micro-batch.
        places: the answer [dp * pp, NUM_PLACE].
    """
    flop_per_s, hbm, overhead_s = tables.flop_per_s[task], tables.hbm_bytes_per_s[task], tables.overhead_s
    latency_s, s_per_byte, steps = tables.latency_s, tables.s_per_byte, ring_steps(tables, tp)
    sent_bytes = tables.terms[task, ACTIVATION_BYTES] * mbs
    ring_bytes = sent_bytes * (2.0 * (tp - 1) / tp)
    for place in range(dp * pp):
        at = place * tp
        home, is_last = machines[at], place % pp == pp - 1
        is_inside = is_on(machines, at, tp, home)
        if place >= pp and is_same(machines, at, at - pp * tp, tp if is_last else 2 * tp):
            for column in range(NUM_PLACE):  # as the stage of the replica before, its neighbour included
                places[place, column] = places[place - pp, column]
            continue
        places[place, FLOP_PER_S], places[place, HBM_BYTES_PER_S] = flop_per_s[home], hbm[home]
        places[place, OVERHEAD_S], places[place, RING_S], places[place, PAIR_S] = overhead_s[home], 0.0, 0.0
        if is_inside and tp > 1:
            places[place, RING_S] = steps * latency_s[home, home] + ring_bytes * s_per_byte[home, home]
        elif tp > 1:
            for machine in machines[at + 1 : at + tp]:
                places[place, FLOP_PER_S] = min(places[place, FLOP_PER_S], flop_per_s[machine])
                places[place, HBM_BYTES_PER_S] = min(places[place, HBM_BYTES_PER_S], hbm[machine])
                places[place, OVERHEAD_S] = max(places[place, OVERHEAD_S], overhead_s[machine])
            places[place, RING_S] = ring_s(tables, machines, at, tp, 1, ring_bytes)
        if not is_last:
            other = machines[at + tp]
            if is_inside and is_on(machines, at + tp, tp, other):
                places[place, PAIR_S] = latency_s[home, other] + sent_bytes * s_per_byte[home, other]
            else:
                places[place, PAIR_S] = pair_s(tables, machines, at, at + tp, tp, sent_bytes)


@inner
def is_on(machines: IntArray, start: int, count: int, home: int) -> bool:
    """Tell whether a run of GPUs is on one machine."""
    for index in range(start, start + count):
        if machines[index] != home:
            return False
    return True


@inner
def is_same(machines: IntArray, first: int, second: int, size: int) -> bool:
    """Tell whether two runs of GPUs are on the same machines."""
    for index in range(size):
        if machines[first + index] != machines[second + index]:
            return False
    return True


@inner
def least_at(values: FloatArray, machines: IntArray, start: int, tp: int) -> float:
    """Return the least value of a stage's GPUs, of values by machine [M]."""
    least = math.inf
    for index in range(start, start + tp):
        least = min(least, values[machines[index]])
    return least
