"""Seconds of stages, replicas and tasks: `plans.cost.task_cost` for placements with uniform degrees.

Machines of a task are given replica by replica, stage by stage, shard by shard; a stage begins at `start`.
"""

from __future__ import annotations

import math

import numpy as np

from plans.cost.compiled.arrays import are_equal, fill, largest_of, non_zero
from plans.cost.compiled.jit import inner
from plans.cost.compiled.places import (
    FLOP_PER_S,
    HBM_BYTES_PER_S,
    NUM_PLACE,
    OVERHEAD_S,
    PAIR_S,
    RING_S,
    is_same,
    measure_places,
)
from plans.cost.compiled.rings import pair_s, ring_of_counts_s, ring_s, ring_steps
from plans.cost.compiled.tables import (
    DECODE_CACHE_BYTES,
    DECODE_GROUPS,
    DECODE_HEAD_BYTES,
    DECODE_HEAD_FLOP,
    DECODE_KV_HEADS,
    DECODE_LAYER_BYTES,
    DECODE_LAYER_FLOP,
    DECODE_RESPONSE,
    DECODE_TOKEN_BYTES,
    DECODE_TP_COUNT,
    DECODES,
    GRADIENT_FIRST_BYTES,
    GRADIENT_LAST_BYTES,
    GRADIENT_LAYER_BYTES,
    HAS_BUBBLE,
    HEAD_FLOP,
    LAYER_FLOP,
    PADS,
    PASSES,
    PP_COUNT,
    SHARES_LINKS,
    TP_COUNT,
    TRAINS,
    UPDATES,
    FloatArray,
    IntArray,
    Tables,
)

#: Sequences decoded together that layer splits of generation assume.
TYPICAL_BATCH = 64.0


@inner
def sample_s(terms: FloatArray, places: FloatArray, place: int, layers: int, tp: int, is_last: bool) -> float:
    """Return C_comp of a stage per sample."""
    flop = layers * terms[LAYER_FLOP] + (terms[HEAD_FLOP] if is_last else 0.0)
    return terms[PASSES] * flop / (places[place, FLOP_PER_S] * tp)


@inner
def link_s(terms: FloatArray, places: FloatArray, place: int, layers: int) -> float:
    """Return C_tp + C_pp of a stage per micro-batch."""
    return terms[TP_COUNT] * layers * places[place, RING_S] + terms[PP_COUNT] * places[place, PAIR_S]


@inner
def decode_step_s(
    terms: FloatArray, places: FloatArray, place: int, layers: int, pp: int, tp: int, batch: int, is_last: bool
) -> float:
    """Return seconds per decode step of a stage, all groups of the batch included, without its links."""
    groups = pp if terms[DECODE_GROUPS] else 1
    head_bytes = terms[DECODE_HEAD_BYTES] if is_last else 0.0
    head_flop = terms[DECODE_HEAD_FLOP] if is_last else 0.0
    weights = groups * (layers * terms[DECODE_LAYER_BYTES] + head_bytes) / tp
    cache = batch * layers * terms[DECODE_CACHE_BYTES] / min(float(tp), terms[DECODE_KV_HEADS])
    work = batch * (layers * terms[DECODE_LAYER_FLOP] + head_flop) / tp
    seconds = max((weights + cache) / places[place, HBM_BYTES_PER_S], work / places[place, FLOP_PER_S])
    return seconds + groups * layers * places[place, OVERHEAD_S]


@inner
def add_decode_links(
    tables: Tables, terms: FloatArray, machines: IntArray, start: int, layers: IntArray, tp: int, batch: int,
    step_s: FloatArray,
) -> None:  # fmt: skip
    """Add what links take per decode step to the seconds of a replica's stages [pp]; the replica begins at `start`."""
    pp = len(layers)
    groups = pp if terms[DECODE_GROUPS] else 1
    share_bytes = batch / groups * terms[DECODE_TOKEN_BYTES]
    for j in range(pp):
        at = start + j * tp
        if tp > 1:
            ring = ring_s(tables, machines, at, tp, 1, share_bytes * (2.0 * (tp - 1) / tp))
            step_s[j] += groups * terms[DECODE_TP_COUNT] * layers[j] * ring
        if j < pp - 1:
            step_s[j] += groups * pair_s(tables, machines, at, at + tp, tp, share_bytes)


@inner
def decode_steps_s(
    tables: Tables, task: int, machines: IntArray, places: FloatArray, replica: int, layers: IntArray, tp: int,
    batch: int, step_s: FloatArray,
) -> None:  # fmt: skip
    """Write the seconds per decode step of the stages of one replica [pp]; 0 where the task does not decode."""
    terms, pp = tables.terms[task], len(layers)
    if not terms[DECODES]:
        fill(step_s, 0.0)
        return
    for j in range(pp):
        step_s[j] = decode_step_s(terms, places, replica * pp + j, layers[j], pp, tp, batch, j == pp - 1)
    if terms[DECODE_TP_COUNT]:
        add_decode_links(tables, terms, machines, replica * pp * tp, layers, tp, batch, step_s)


@inner
def placed_totals(
    tables: Tables, task: int, machines: IntArray, places: FloatArray, replica: int, layers: IntArray, tp: int,
    mbs: int, samples: int, batch: int, totals: FloatArray,
) -> float:  # fmt: skip
    """Write the seconds of each stage of one replica [pp]; return its pipeline fill."""
    terms, pp = tables.terms[task], len(layers)
    micro_batches = -(-samples // mbs)
    counted = float(micro_batches * mbs if terms[PADS] else samples)
    decode_steps_s(tables, task, machines, places, replica, layers, tp, batch, totals)
    steps = terms[DECODE_RESPONSE] * counted / batch + tables.tails[batch] if terms[DECODES] else 0.0
    flow_sample = flow_link = 0.0
    for j in range(pp):
        compute = sample_s(terms, places, replica * pp + j, layers[j], tp, j == pp - 1)
        links = link_s(terms, places, replica * pp + j, layers[j])
        totals[j] = counted * compute + micro_batches * links + steps * totals[j]
        if j:
            flow_sample += compute
            flow_link += links
    if not terms[HAS_BUBBLE] or pp == 1:
        return 0.0
    return terms[UPDATES] * (counted * flow_sample + micro_batches * flow_link) / micro_batches


@inner
def stage_totals(
    tables: Tables, task: int, machines: IntArray, layers: IntArray, tp: int, mbs: int, samples: int, batch: int,
    totals: FloatArray,
) -> float:  # fmt: skip
    """Write the seconds of each stage of a replica on these machines [pp]; return its pipeline fill."""
    pp = len(layers)
    places = np.empty((pp, NUM_PLACE))
    measure_places(tables, task, machines, 1, pp, tp, mbs, places)
    return placed_totals(tables, task, machines, places, 0, layers, tp, mbs, samples, batch, totals)


@inner
def task_s(
    tables: Tables, task: int, machines: IntArray, layers: IntArray, tp: int, mbs: int, samples: IntArray,
    batches: IntArray,
) -> float:  # fmt: skip
    """Return the cost of a task, as `placed_task_s`."""
    places = np.empty((len(samples) * len(layers), NUM_PLACE))
    measure_places(tables, task, machines, len(samples), len(layers), tp, mbs, places)
    return placed_task_s(tables, task, machines, places, layers, tp, mbs, samples, batches)


@inner
def placed_task_s(
    tables: Tables, task: int, machines: IntArray, places: FloatArray, layers: IntArray, tp: int, mbs: int,
    samples: IntArray, batches: IntArray,
) -> float:  # fmt: skip
    """Return the cost of a task: its slowest replica (slowest stage + bubble) and the gradient all-reduce.

    Args:
        tables: the constants.
        task: its row.
        machines: machine of each tasklet [dp * pp * tp].
        places: its places [dp * pp, NUM_PLACE].
        layers: layers per stage [pp].
        tp: shards per stage.
        mbs: samples per micro-batch.
        samples: samples per replica [dp].
        batches: decode batch per replica [dp] of generation; empty for other tasks.
    """
    size, slowest, totals = len(layers) * tp, 0.0, np.empty(len(layers))
    for i in range(len(samples)):
        batch = batches[i] if len(batches) else 1
        is_known = i > 0 and samples[i] == samples[i - 1] and (len(batches) == 0 or batch == batches[i - 1])
        if is_known and is_same(machines, i * size, (i - 1) * size, size):
            continue
        bubble = placed_totals(tables, task, machines, places, i, layers, tp, mbs, samples[i], batch, totals)
        slowest = max(slowest, largest_of(totals) + bubble)
    if tables.terms[task, TRAINS]:
        slowest += gradient_s(tables, task, machines, len(samples), layers, tp)
    return slowest


@inner
def gradient_s(tables: Tables, task: int, machines: IntArray, dp: int, layers: IntArray, tp: int) -> float:
    """Return C_dp: the slowest gradient ring of any stage and shard, and the fullest link where rings share it."""
    if dp == 1:
        return 0.0
    terms, pp, num_machines = tables.terms[task], len(layers), len(tables.region)
    shares, width = terms[SHARES_LINKS] != 0.0, len(layers) * tp
    counts = np.zeros((width if shares else 1, num_machines), dtype=np.int64)
    carried = np.zeros(width)
    slowest = 0.0
    for j in range(pp):
        weight_bytes = layers[j] * terms[GRADIENT_LAYER_BYTES]
        weight_bytes += (terms[GRADIENT_FIRST_BYTES] if j == 0 else 0.0) + (
            terms[GRADIENT_LAST_BYTES] if j == pp - 1 else 0.0
        )
        num_bytes = weight_bytes * (2.0 * (dp - 1) / (dp * tp))
        for rank in range(j * tp, j * tp + tp):
            carried[rank] = num_bytes
            if shares:
                for i in range(dp):
                    counts[rank, machines[i * width + rank]] += 1
            if rank == j * tp or not _is_same_column(machines, rank, rank - 1, width, dp):
                slowest = max(slowest, ring_s(tables, machines, rank, dp, width, num_bytes))
    if shares:
        slowest = max(slowest, _fullest_link_s(tables, counts, carried, dp))
    return terms[UPDATES] * slowest


@inner
def _is_same_column(machines: IntArray, first: int, second: int, width: int, dp: int) -> bool:
    for i in range(dp):
        if machines[i * width + first] != machines[i * width + second]:
            return False
    return True


@inner
def _fullest_link_s(tables: Tables, counts: IntArray, carried: FloatArray, size: int) -> float:
    """Return the seconds until the fullest link between machines has carried all rings (`plans.cost.sharing`).

    Args:
        tables: the constants.
        counts: GPUs per machine of each ring [rings, M].
        carried: bytes over each of its edges [rings].
        size: GPUs of a ring.
    """
    num_machines, slowest = counts.shape[1], 0.0
    number, places = np.empty(num_machines, dtype=np.int64), _used_machines(counts)
    for index in range(len(places)):
        number[places[index]] = index
    load = np.zeros((len(places), len(places)))
    for ring in range(len(carried)):
        visited = non_zero(counts[ring])
        k = len(visited)
        if k == 1:
            continue
        if _needs_forbidden(tables, visited):
            slowest = max(slowest, _shared_ring_s(tables, counts, carried, ring))
            continue
        for index in range(k):
            load[number[visited[index - 1]], number[visited[index]]] += carried[ring]
    steps = ring_steps(tables, size)
    for a in range(len(places)):
        for b in range(len(places)):
            if load[a, b] > 0.0:
                latency = tables.latency_s[places[a], places[b]]
                slowest = max(slowest, steps * latency + load[a, b] * tables.s_per_byte[places[a], places[b]])
    return slowest


@inner
def _used_machines(counts: IntArray) -> IntArray:
    """Return the machines that any ring visits, of the GPUs per machine of each [rings, M]."""
    used = np.zeros(counts.shape[1], dtype=np.int64)
    for ring in counts:
        for machine in range(len(used)):
            used[machine] += ring[machine]
    return non_zero(used)


@inner
def _needs_forbidden(tables: Tables, visited: IntArray) -> bool:
    for index in range(len(visited)):
        if math.isinf(tables.latency_s[visited[index - 1], visited[index]]):
            return True
    return False


@inner
def _shared_ring_s(tables: Tables, counts: IntArray, carried: FloatArray, ring: int) -> float:
    """Return the seconds of all rings over the same machines as one, in the best order, one after the other."""
    total = 0.0
    for other in range(len(carried)):
        if are_equal(counts[other], counts[ring]):
            total += carried[other]
    return ring_of_counts_s(tables, counts[ring], total)


@inner
def shares_s(terms: FloatArray, places: FloatArray, place: int, tp: int, mbs: int) -> tuple[float, float]:
    """Return rough seconds per sample of a layer and of the head on a stage: compute, TP ring, typical decoding."""
    rate = places[place, FLOP_PER_S] * tp
    layer = terms[PASSES] * terms[LAYER_FLOP] / rate
    layer += terms[TP_COUNT] / mbs * places[place, RING_S]
    head = terms[PASSES] * terms[HEAD_FLOP] / rate
    if terms[DECODES]:
        # One sequence of a decode batch of typical size; only the relation between stages matters.
        steps = terms[DECODE_RESPONSE] / TYPICAL_BATCH
        bandwidth = places[place, HBM_BYTES_PER_S] * tp
        layer += steps * terms[DECODE_LAYER_BYTES] / bandwidth
        head += steps * terms[DECODE_HEAD_BYTES] / bandwidth
    return layer, head


@inner
def unit_s(
    tables: Tables, task: int, machines: IntArray, places: FloatArray, replica: int, layers: IntArray, tp: int,
    mbs: int, batch: int, step_s: FloatArray,
) -> float:  # fmt: skip
    """Return the seconds per sample of one replica with many samples: its slowest stage; `step_s` [pp] is scratch."""
    terms, pp, slowest = tables.terms[task], len(layers), 0.0
    steps = terms[DECODE_RESPONSE] / batch
    decode_steps_s(tables, task, machines, places, replica, layers, tp, batch, step_s)
    for j in range(pp):
        seconds = sample_s(terms, places, replica * pp + j, layers[j], tp, j == pp - 1)
        seconds += link_s(terms, places, replica * pp + j, layers[j]) / mbs
        slowest = max(slowest, seconds + steps * step_s[j])
    return slowest
