"""Seconds to move new weights from training to generation (`plans.cost.transfer`), for uniform degrees.

What a receiver takes depends only on its place in its replica (its part), what that costs on its machine and on the
machines of the training replica. Replicas on the same machines are one kind of sender.
"""

from __future__ import annotations

import math

import numpy as np

from plans.cost.compiled.arrays import are_equal, fill, largest_of, non_zero
from plans.cost.compiled.jit import inner
from plans.cost.compiled.places import is_same
from plans.cost.compiled.rings import edge_s, ring_of_counts_s
from plans.cost.compiled.tables import (
    DELTA_FRACTION,
    DIRECT,
    DP,
    EMBEDDING_BYTES,
    FANOUT,
    LINE_HEAD_BYTES,
    LINE_LAYER_BYTES,
    LINE_LAYERS,
    PP,
    SEQUENTIAL,
    SYNC_FACTOR,
    TP,
    FloatArray,
    IntArray,
    Tables,
)
from plans.cost.transfer import CLEARLY_LESS


@inner
def transfer_s(
    tables: Tables, row: IntArray, gpus: IntArray, layers: IntArray, row_g: IntArray, gpus_g: IntArray,
    layers_g: IntArray,
) -> float:  # fmt: skip
    """Return C_reshard or C_sync.

    Args:
        tables: the constants.
        row: degrees of actor training (a row of the plan's shape).
        gpus: its GPUs [dp * pp * tp].
        layers: its layers per stage [pp].
        row_g: degrees of generation; row_g, gpus_g and layers_g are the same of generation.
        gpus_g: its GPUs.
        layers_g: its layers.
    """
    has_degrees = row[PP] == row_g[PP] and row[TP] == row_g[TP]
    if has_degrees and len(gpus) == len(gpus_g) and are_equal(gpus, gpus_g) and are_equal(layers, layers_g):
        return 0.0
    homes = np.empty(len(tables.machine_of), dtype=np.int64)
    fill(homes, -1)
    for index in range(len(gpus)):
        homes[gpus[index]] = index
    shared = 0
    for gpu in gpus_g:
        shared += homes[gpu] >= 0
    factor, fraction = tables.numbers[SYNC_FACTOR], tables.numbers[DELTA_FRACTION]
    if shared == len(gpus) == len(gpus_g) and _is_nested(homes, row, row_g, gpus_g):
        if has_degrees:  # only the order differs
            return factor * _direct_s(tables, homes, row, gpus, layers, row_g, gpus_g, layers_g, 1.0)
        return factor * _reshard_s(tables, row, gpus, row_g)
    if tables.facts[FANOUT] == DIRECT or shared:
        return factor * _direct_s(tables, homes, row, gpus, layers, row_g, gpus_g, layers_g, fraction)
    senders, receivers = _machines(tables, gpus), _machines(tables, gpus_g)
    num_bytes = _line_bytes(tables) * fraction
    if tables.facts[FANOUT] == SEQUENTIAL:
        seconds = 0.0
        for receiver in receivers:
            seconds += _fastest_s(tables, senders, receiver, num_bytes)
        return factor * seconds
    return factor * _per_region_s(tables, senders, receivers, num_bytes)


@inner
def _line_bytes(tables: Tables) -> float:
    numbers = tables.numbers
    return numbers[EMBEDDING_BYTES] + tables.facts[LINE_LAYERS] * numbers[LINE_LAYER_BYTES] + numbers[LINE_HEAD_BYTES]


@inner
def _is_nested(homes: IntArray, row: IntArray, row_g: IntArray, gpus_g: IntArray) -> bool:
    """Tell whether every generation replica lies inside one training replica."""
    size, size_g = row[PP] * row[TP], row_g[PP] * row_g[TP]
    for index in range(len(gpus_g)):
        first = gpus_g[index // size_g * size_g]
        if homes[gpus_g[index]] // size != homes[first] // size:
            return False
    return True


@inner
def _machines(tables: Tables, gpus: IntArray) -> IntArray:
    """Return the machines of some GPUs, ascending."""
    has = np.zeros(len(tables.region), dtype=np.int64)
    for gpu in gpus:
        has[tables.machine_of[gpu]] = 1
    return non_zero(has)


@inner
def _fastest_s(tables: Tables, senders: IntArray, receiver: int, num_bytes: float) -> float:
    least = math.inf
    for sender in senders:
        least = min(least, edge_s(tables, sender, receiver, num_bytes))
    return least


@inner
def _in_region(tables: Tables, machines: IntArray, region: int) -> IntArray:
    """Return the machines in a region, in order."""
    inside, found = np.empty(len(machines), dtype=np.int64), 0
    for machine in machines:
        if tables.region[machine] == region:
            inside[found] = machine
            found += 1
    return inside[:found]


@inner
def _per_region_s(tables: Tables, senders: IntArray, receivers: IntArray, num_bytes: float) -> float:
    """Return the time of one copy into each region, then copies inside it at the same time; max over regions."""
    slowest = 0.0
    for region in range(largest_of(tables.region) + 1):
        inside = _in_region(tables, receivers, region)
        if len(inside) == 0:
            continue
        local = _in_region(tables, senders, region)
        if len(local):
            for receiver in inside:
                slowest = max(slowest, _fastest_s(tables, local, receiver, num_bytes))
            continue
        least = math.inf
        for entry in inside:
            onward = 0.0
            for receiver in inside:
                if receiver != entry:
                    onward = max(onward, edge_s(tables, entry, receiver, num_bytes))
            least = min(least, _fastest_s(tables, senders, entry, num_bytes) + onward)
        slowest = max(slowest, least)
    return slowest


@inner
def _reshard_s(tables: Tables, row: IntArray, gpus: IntArray, row_g: IntArray) -> float:
    """Return the slowest ring of a micro-DP group, or of a training replica where degrees do not divide."""
    p, t, p_g, t_g = row[PP], row[TP], row_g[PP], row_g[TP]
    if t % t_g or p % p_g:
        volume, height, width = _line_bytes(tables) * (t * p - 1) / (t * p), p, t
    else:
        volume = _line_bytes(tables) * (t * p - t_g * p_g) / (t_g * p_g * t * p)
        height, width = p // p_g, t // t_g
    slowest = 0.0
    for i in range(row[DP]):
        for j in range(0, p, height):
            for k in range(0, t, width):
                counts = np.zeros(len(tables.region), dtype=np.int64)
                for stage in range(j, j + height):
                    for rank in range(k, k + width):
                        counts[tables.machine_of[gpus[(i * p + stage) * t + rank]]] += 1
                slowest = max(slowest, ring_of_counts_s(tables, counts, volume))
    return slowest


@inner
def _parts(
    tables: Tables, row: IntArray, layers: IntArray, row_g: IntArray, layers_g: IntArray, fraction: float
) -> FloatArray:
    """Return the bytes that each tasklet of a generation replica takes from each of a training replica."""
    p, t, p_g, t_g = row[PP], row[TP], row_g[PP], row_g[TP]
    numbers, total = tables.numbers, tables.facts[LINE_LAYERS]
    parts = np.zeros((p_g * t_g, p * t))
    low_g = 0
    for g in range(p_g):
        high_g, low_t = low_g + layers_g[g], 0
        for s in range(p):
            high_t = low_t + layers[s]
            low, high = max(low_g, low_t), min(high_g, high_t)
            if low < high:
                ends = numbers[EMBEDDING_BYTES] if low == 0 else 0.0
                ends += numbers[LINE_HEAD_BYTES] if high == total else 0.0
                shared = (high - low) * numbers[LINE_LAYER_BYTES] + ends
                for r in range(t_g):
                    for k in range(t):
                        overlap = min((r + 1) / t_g, (k + 1) / t) - max(r / t_g, k / t)
                        if overlap > 0.0:
                            parts[g * t_g + r, s * t + k] = shared * overlap * fraction
            low_t = high_t
        low_g = high_g
    return parts


@inner
def _pull_s(tables: Tables, part: FloatArray, machines: IntArray, start: int, receiver: int, held: int) -> float:
    """Return the seconds in which a GPU on a machine pulls its part from the replica at `start`.

    `held`: tasklet of the replica that is the GPU itself and costs nothing; -1 = none.
    """
    seconds = 0.0
    for source in range(len(part)):
        if part[source] > 0.0 and source != held:
            seconds += edge_s(tables, machines[start + source], receiver, part[source])
    return seconds


@inner
def _direct_s(
    tables: Tables, homes: IntArray, row: IntArray, gpus: IntArray, layers: IntArray, row_g: IntArray, gpus_g: IntArray,
    layers_g: IntArray, fraction: float,
) -> float:  # fmt: skip
    """Return max(slowest receiver, busiest sender) when every tasklet pulls from its cheapest replica."""
    size, size_g, num_machines = row[PP] * row[TP], row_g[PP] * row_g[TP], len(tables.region)
    parts = _parts(tables, row, layers, row_g, layers_g, fraction)
    machines = np.empty(len(gpus), dtype=np.int64)
    for index in range(len(gpus)):
        machines[index] = tables.machine_of[gpus[index]]
    firsts, seconds_of = _kinds(machines, row[DP], size)
    known_s = np.zeros((size_g, num_machines))
    known = np.empty((size_g, num_machines), dtype=np.int64)
    for place in range(size_g):
        fill(known_s[place], -1.0)
    sent = np.zeros(len(gpus))
    slowest = 0.0
    for index in range(len(gpus_g)):
        part, home, receiver = index % size_g, homes[gpus_g[index]], tables.machine_of[gpus_g[index]]
        if home >= 0 and parts[part, home % size] > 0.0:
            best_s, replica = _own_pull(tables, parts[part], machines, firsts, seconds_of, size, receiver, home)
            held = home % size if replica == home // size else -1
        else:
            # A GPU that trains is like any other where it holds nothing of what it needs.
            if known_s[part, receiver] < 0.0:
                best_s, replica = _pull_from_kinds(tables, parts[part], machines, firsts, size, receiver)
                known_s[part, receiver], known[part, receiver] = best_s, replica
            best_s, replica, held = known_s[part, receiver], known[part, receiver], -1
        slowest = max(slowest, best_s)
        for source in range(size):
            if parts[part, source] > 0.0 and source != held:
                at = replica * size + source
                sent[at] += edge_s(tables, machines[at], receiver, parts[part, source])
    return max(slowest, largest_of(sent))


@inner
def _kinds(machines: IntArray, dp: int, size: int) -> tuple[IntArray, IntArray]:
    """Return the first and the second training replica of each kind, kinds by their first; -1 = no second."""
    firsts, seconds, found = np.empty(dp, dtype=np.int64), np.empty(dp, dtype=np.int64), 0
    fill(seconds, -1)
    for i in range(dp):
        is_new = True
        for kind in range(found):
            if is_same(machines, i * size, firsts[kind] * size, size):
                is_new = False
                if seconds[kind] < 0:
                    seconds[kind] = i
                break
        if is_new:
            firsts[found] = i
            found += 1
    return firsts[:found], seconds[:found]


@inner
def _pull_from_kinds(
    tables: Tables, part: FloatArray, machines: IntArray, firsts: IntArray, size: int, receiver: int
) -> tuple[float, int]:
    """Return (seconds, replica) of the first pull that is not clearly slower than the fastest."""
    pulls, least, nobody = np.empty(len(firsts)), math.inf, np.int64(-1)
    for kind in range(len(firsts)):
        pulls[kind] = _pull_s(tables, part, machines, firsts[kind] * size, receiver, nobody)
        least = min(least, pulls[kind])
    for kind in range(len(firsts)):
        if pulls[kind] * CLEARLY_LESS <= least:
            return pulls[kind], firsts[kind]
    return math.inf, firsts[0]


@inner
def _own_pull(
    tables: Tables, part: FloatArray, machines: IntArray, firsts: IntArray, seconds: IntArray, size: int, receiver: int,
    home: int,
) -> tuple[float, int]:  # fmt: skip
    """Return (seconds, replica) for a GPU that trains, as tasklet `home`, and holds a piece of what it needs."""
    own = home // size
    own_s = _pull_s(tables, part, machines, own * size, receiver, home % size)
    pulls, least, nobody = np.empty(len(firsts)), own_s, np.int64(-1)
    for kind in range(len(firsts)):
        pulls[kind] = math.inf
        # A replica of its own kind, but another one, sends everything.
        if firsts[kind] != own or seconds[kind] >= 0:
            pulls[kind] = _pull_s(tables, part, machines, firsts[kind] * size, receiver, nobody)
            least = min(least, pulls[kind])
    chosen, chosen_s = own, own_s
    if not own_s * CLEARLY_LESS <= least:
        chosen = np.int64(len(machines))
    for kind in range(len(firsts)):
        replica = seconds[kind] if firsts[kind] == own else firsts[kind]
        if replica >= 0 and pulls[kind] * CLEARLY_LESS <= least and replica < chosen:
            chosen, chosen_s = replica, pulls[kind]
    return chosen_s, chosen
