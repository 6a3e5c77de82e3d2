"""Load balancing of a task's placement: layers per stage and samples per replica (rules of `plans.balance`)."""

from __future__ import annotations

import math

import numpy as np

from plans.cost.compiled.arrays import fill, largest_at, least_of
from plans.cost.compiled.jit import inner
from plans.cost.compiled.memory import parameter_bytes
from plans.cost.compiled.places import NUM_PLACE, is_same, measure_places
from plans.cost.compiled.stages import shares_s, unit_s
from plans.cost.compiled.tables import (
    FIRST_PARAMETERS,
    LAST_PARAMETERS,
    LAYER_PARAMETERS,
    NUM_LAYERS,
    SPLIT_EVEN,
    SPLIT_MEMORY,
    FloatArray,
    IntArray,
    Tables,
)


@inner
def room_bytes(capacity: FloatArray, machines: IntArray, dp: int, pp: int, tp: int) -> FloatArray:
    """Return the bytes that tasklets of each stage may use: those of its smallest GPU [pp].

    `capacity`: bytes that tasklets may use on a GPU of each machine [M].
    """
    room = np.empty(pp)
    fill(room, math.inf)
    for index in range(dp * pp * tp):
        stage = index // tp % pp
        room[stage] = min(room[stage], capacity[machines[index]])
    return room


@inner
def resident_share(tables: Tables, task: int, machines: IntArray, dp: int, layers: IntArray, tp: int) -> float:
    """Return the largest share of a GPU's memory that its shard of the model fills."""
    memory, pp, largest = tables.memory.tasks[task], len(layers), 0.0
    room, each = room_bytes(tables.memory.capacity_bytes, machines, dp, pp, tp), parameter_bytes(memory, dp) / tp
    for j in range(pp):
        parameters = layers[j] * memory[LAYER_PARAMETERS]
        parameters += memory[FIRST_PARAMETERS] if j == 0 else 0.0
        parameters += memory[LAST_PARAMETERS] if j == pp - 1 else 0.0
        largest = max(largest, parameters * each / room[j])
    return largest


@inner
def split_layers(
    tables: Tables, task: int, machines: IntArray, dp: int, pp: int, tp: int, mbs: int, split: int, layers: IntArray
) -> bool:
    """Write the layers per stage [pp], as `placed_split`."""
    places = np.empty((dp * pp, NUM_PLACE))
    measure_places(tables, task, machines, dp, pp, tp, mbs, places)
    return placed_split(tables, task, machines, places, dp, pp, tp, mbs, split, layers)


@inner
def placed_split(
    tables: Tables, task: int, machines: IntArray, places: FloatArray, dp: int, pp: int, tp: int, mbs: int, split: int,
    layers: IntArray,
) -> bool:  # fmt: skip
    """Write the layers per stage [pp]; False where no split fits the memory or the layers.

    `machines` and `places`: machine of each tasklet and the places of the task.
    """
    total = np.int64(tables.terms[task, NUM_LAYERS])
    if pp == 1:
        layers[0] = total
        return True
    if pp > total:
        return False
    if split == SPLIT_EVEN:
        _even(total, layers)
        return True
    room = room_bytes(tables.memory.capacity_bytes, machines, dp, pp, tp)
    if split == SPLIT_MEMORY:
        _proportional(total, room, layers)
        return True
    relative, fixed = np.zeros(pp), np.zeros(pp)
    if not _relative_costs(tables.terms[task], machines, places, dp, tp, mbs, relative, fixed):
        _even(total, layers)  # a TP group over a forbidden link: no split helps
        return True
    memory = tables.memory.tasks[task]
    each = parameter_bytes(memory, dp) / tp
    room[0] -= each * memory[FIRST_PARAMETERS]
    room[-1] -= each * memory[LAST_PARAMETERS]
    caps = np.empty(pp, dtype=np.int64)
    for j in range(pp):
        caps[j] = max(1, np.int64(math.floor(room[j] / (each * memory[LAYER_PARAMETERS]))))
    return greedy_layers(total, relative, fixed, caps, layers)


@inner
def _relative_costs(
    terms: FloatArray, machines: IntArray, places: FloatArray, dp: int, tp: int, mbs: int, relative: FloatArray,
    fixed: FloatArray,
) -> bool:  # fmt: skip
    """Write the cost of a layer on each stage and of the head on the last, relative to a replica's mean; largest count.

    False where a stage's cost is infinite.
    """
    pp, head = len(relative), 0.0
    each = np.empty(pp)
    for i in range(dp):
        start = i * pp * tp
        if i and is_same(machines, start, start - pp * tp, pp * tp):
            continue
        last = total = 0.0
        for j in range(pp):
            each[j], last = shares_s(terms, places, i * pp + j, tp, mbs)
            total += each[j]
        mean = total / pp
        if not math.isfinite(mean):
            return False
        for j in range(pp):
            relative[j] = max(relative[j], each[j] / mean)
        head = max(head, last / mean)
    fixed[-1] = head
    return True


@inner
def greedy_layers(total: int, layer_s: FloatArray, fixed_s: FloatArray, caps: IntArray, layers: IntArray) -> bool:
    """Write layers per stage that make the slowest stage fastest; False where the caps hold too few layers.

    Each next layer goes to the stage that would then finish first: exact, see `plans.balance.balance_layers`.
    """
    pp, room = len(layers), 0
    for j in range(pp):
        layers[j] = 1
        room += caps[j]
    if total < pp or room < total or least_of(caps) < 1:
        return False
    for _ in range(total - pp):
        best, least = -1, math.inf
        for j in range(pp):
            if layers[j] < caps[j]:
                finish = (layers[j] + 1) * layer_s[j] + fixed_s[j]
                if best < 0 or finish < least:
                    best, least = j, finish
        layers[best] += 1
    return True


@inner
def _proportional(total: int, weights: FloatArray, shares: IntArray) -> None:
    """Write whole shares in proportion to weights, by largest remainder, each at least 1 (`proportional_shares`)."""
    count, weight_sum, scale = len(weights), 0.0, 0.0
    for weight in weights:
        weight_sum += weight
    spare = total - count
    exact = np.empty(count)
    for i in range(count):
        exact[i] = max(0.0, total * weights[i] / weight_sum - 1)
        scale += exact[i]
    factor = spare / scale if scale > 0.0 else 0.0
    left = spare
    rest = np.empty(count)
    for i in range(count):
        exact[i] *= factor
        shares[i] = np.int64(math.floor(exact[i] + 1e-9))
        rest[i] = exact[i] - shares[i]
        left -= shares[i]
    for _ in range(left):
        best = largest_at(rest)
        shares[best] += 1
        rest[best] -= 2.0  # served
    if left < 0:  # floors of almost whole numbers were rounded up
        shares[largest_at(rest)] += left
    for i in range(count):
        shares[i] += 1


@inner
def _even(total: int, shares: IntArray) -> None:
    """Write whole shares of equal weights, as `_proportional`."""
    weights = np.empty(len(shares))
    fill(weights, 1.0)
    _proportional(total, weights, shares)


@inner
def even_samples(total: int, samples: IntArray) -> None:
    """Write equal samples per replica, the first ones one more where they do not divide."""
    dp = len(samples)
    base, extra = total // dp, total % dp
    for i in range(dp):
        samples[i] = base + 1 if i < extra else base


@inner
def speed_samples(
    tables: Tables, task: int, machines: IntArray, places: FloatArray, layers: IntArray, tp: int, mbs: int,
    rooms: IntArray, total: int, samples: IntArray,
) -> None:  # fmt: skip
    """Write samples per replica in proportion to speed; equal ones where all are equally fast, or one can't work.

    `rooms`: sequences that each replica of generation can decode together; empty for other tasks.
    """
    dp, size = len(samples), len(layers) * tp
    even_samples(total, samples)
    if dp == 1:
        return
    units, step_s, slowest, least = np.empty(dp), np.empty(len(layers)), 0.0, math.inf
    for i in range(dp):
        batch = max(1, rooms[i]) if len(rooms) else 1
        is_known = i > 0 and (len(rooms) == 0 or rooms[i] == rooms[i - 1])
        if is_known and is_same(machines, i * size, (i - 1) * size, size):
            units[i] = units[i - 1]
        else:
            units[i] = unit_s(tables, task, machines, places, i, layers, tp, mbs, batch, step_s)
        slowest, least = max(slowest, units[i]), min(least, units[i])
    if slowest <= least * (1.0 + 1e-9) or not math.isfinite(slowest):
        return
    share_samples(total, units, samples)


@inner
def share_samples(total: int, units: FloatArray, samples: IntArray) -> None:
    """Write samples per replica that minimise the largest `samples * unit`, each at least 1.

    Floors of the proportional shares, then one sample at a time to the replica that would finish first: exact for
    linear costs. Equally fast replicas are served together, the first of them first; `total` >= replicas.
    """
    dp = len(units)
    of = np.empty(dp, dtype=np.int64)
    seconds, members = np.empty(dp), np.zeros(dp, dtype=np.int64)
    classes = 0
    for i in range(dp):
        found = classes
        for c in range(classes):
            if seconds[c] == units[i]:
                found = c
                break
        if found == classes:
            seconds[classes] = units[i]
            classes += 1
        of[i] = found
        members[found] += 1
    held = np.empty(classes, dtype=np.int64)
    rate = 0.0
    for c in range(classes):
        rate += members[c] / seconds[c]
    left = total
    for c in range(classes):
        held[c] = members[c] * max(1, np.int64(math.floor(total / (seconds[c] * rate) + 1e-9)))
        left -= held[c]
    _give(left, seconds[:classes], members[:classes], held)
    given = np.zeros(classes, dtype=np.int64)
    for i in range(dp):
        c = of[i]
        samples[i] = held[c] // members[c] + (1 if given[c] < held[c] % members[c] else 0)
        given[c] += 1


@inner
def _give(left: int, seconds: FloatArray, members: IntArray, held: IntArray) -> None:
    """Give out the samples that are left to classes of replicas, or take back what was given too much."""
    classes = len(seconds)
    while left > 0:
        chosen, least = 0, math.inf
        for c in range(classes):
            finish = (held[c] // members[c] + 1) * seconds[c]
            if finish < least:
                chosen, least = c, finish
        given = min(left, members[chosen] - held[chosen] % members[chosen])
        held[chosen] += given
        left -= given
    while left < 0:
        # Lifting slow replicas to one sample took too many: the slowest of the others give them back.
        chosen, most = -1, -1.0
        for c in range(classes):
            finish = -(-held[c] // members[c]) * seconds[c]
            if held[c] > members[c] and finish > most:
                chosen, most = c, finish
        taken = min(-left, (held[chosen] - 1) % members[chosen] + 1, held[chosen] - members[chosen])
        held[chosen] -= taken
        left += taken
