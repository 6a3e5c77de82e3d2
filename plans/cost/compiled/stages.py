"""Seconds of stages, replicas and tasks: `plans.cost.task_cost` for placements with uniform degrees.

Machines of a task are given replica by replica, stage by stage, shard by shard; a stage begins at `start`.
"""

from __future__ import annotations

import math

import numpy as np

from plans.cost.compiled.jit import compiled
from plans.cost.compiled.rings import pair_s, ring_of_counts_s, ring_s, ring_steps
from plans.cost.compiled.tables import (
    ACTIVATION_BYTES,
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


@compiled
def least_at(values: FloatArray, machines: IntArray, start: int, tp: int) -> float:
    """Return the least value of a stage's GPUs, of values by machine [M]."""
    least = math.inf
    for index in range(start, start + tp):
        least = min(least, values[machines[index]])
    return least


@compiled
def sample_s(tables: Tables, task: int, machines: IntArray, start: int, layers: int, tp: int, is_last: bool) -> float:
    """Return C_comp of a stage per sample."""
    terms = tables.terms[task]
    flop = layers * terms[LAYER_FLOP] + (terms[HEAD_FLOP] if is_last else 0.0)
    return terms[PASSES] * flop / (least_at(tables.flop_per_s[task], machines, start, tp) * tp)


@compiled
def tp_ring_s(tables: Tables, task: int, machines: IntArray, start: int, tp: int, mbs: int) -> float:
    """Return the seconds of one TP all-reduce of a micro-batch over a stage's GPUs."""
    if tp == 1:
        return 0.0
    num_bytes = tables.terms[task, ACTIVATION_BYTES] * mbs * (2.0 * (tp - 1) / tp)
    return ring_s(tables, machines, start, tp, 1, num_bytes)


@compiled
def link_s(
    tables: Tables, task: int, machines: IntArray, start: int, layers: int, tp: int, mbs: int, is_last: bool
) -> float:
    """Return C_tp + C_pp of a stage per micro-batch."""
    terms = tables.terms[task]
    seconds = terms[TP_COUNT] * layers * tp_ring_s(tables, task, machines, start, tp, mbs)
    if not is_last:
        num_bytes = terms[ACTIVATION_BYTES] * mbs
        seconds += terms[PP_COUNT] * pair_s(tables, machines, start, start + tp, tp, num_bytes)
    return seconds


@compiled
def decode_step_s(
    tables: Tables, task: int, machines: IntArray, start: int, layers: int, pp: int, tp: int, batch: int, is_last: bool
) -> float:
    """Return seconds per decode step of a stage, all groups of the batch included."""
    terms = tables.terms[task]
    groups = pp if terms[DECODE_GROUPS] else 1
    flop_per_s = least_at(tables.flop_per_s[task], machines, start, tp)
    hbm = least_at(tables.hbm_bytes_per_s[task], machines, start, tp)
    overhead = 0.0
    for index in range(start, start + tp):
        overhead = max(overhead, tables.overhead_s[machines[index]])
    head_bytes = terms[DECODE_HEAD_BYTES] if is_last else 0.0
    head_flop = terms[DECODE_HEAD_FLOP] if is_last else 0.0
    weights = groups * (layers * terms[DECODE_LAYER_BYTES] + head_bytes) / tp
    cache = batch * layers * terms[DECODE_CACHE_BYTES] / min(float(tp), terms[DECODE_KV_HEADS])
    work = batch * (layers * terms[DECODE_LAYER_FLOP] + head_flop) / tp
    seconds = max((weights + cache) / hbm, work / flop_per_s) + groups * layers * overhead
    if terms[DECODE_TP_COUNT]:
        share_bytes = batch / groups * terms[DECODE_TOKEN_BYTES]
        if tp > 1:
            ring = ring_s(tables, machines, start, tp, 1, share_bytes * (2.0 * (tp - 1) / tp))
            seconds += groups * terms[DECODE_TP_COUNT] * layers * ring
        if not is_last:
            seconds += groups * pair_s(tables, machines, start, start + tp, tp, share_bytes)
    return seconds


@compiled
def stage_totals(
    tables: Tables, task: int, machines: IntArray, start: int, layers: IntArray, tp: int, mbs: int, samples: int,
    batch: int, totals: FloatArray,
) -> float:  # fmt: skip
    """Write the seconds of each stage of one replica [pp]; return its pipeline fill."""
    terms, pp = tables.terms[task], len(layers)
    micro_batches = -(-samples // mbs)
    counted = float(micro_batches * mbs if terms[PADS] else samples)
    steps = 0.0
    if terms[DECODES]:
        steps = terms[DECODE_RESPONSE] * counted / batch + tables.tails[batch]
    flow_sample = flow_link = 0.0
    for j in range(pp):
        at, is_last = start + j * tp, j == pp - 1
        compute = sample_s(tables, task, machines, at, layers[j], tp, is_last)
        links = link_s(tables, task, machines, at, layers[j], tp, mbs, is_last)
        totals[j] = counted * compute + micro_batches * links
        if terms[DECODES]:
            totals[j] += steps * decode_step_s(tables, task, machines, at, layers[j], pp, tp, batch, is_last)
        if j:
            flow_sample += compute
            flow_link += links
    if not terms[HAS_BUBBLE] or pp == 1:
        return 0.0
    return terms[UPDATES] * (counted * flow_sample + micro_batches * flow_link) / micro_batches


@compiled
def replica_s(
    tables: Tables, task: int, machines: IntArray, start: int, layers: IntArray, tp: int, mbs: int, samples: int,
    batch: int,
) -> float:  # fmt: skip
    """Return slowest stage + bubble of one replica."""
    totals = np.empty(len(layers))
    bubble = stage_totals(tables, task, machines, start, layers, tp, mbs, samples, batch, totals)
    return totals.max() + bubble


@compiled
def is_same(machines: IntArray, first: int, second: int, size: int) -> bool:
    """Tell whether two runs of places are on the same machines."""
    for index in range(size):
        if machines[first + index] != machines[second + index]:
            return False
    return True


@compiled
def task_s(
    tables: Tables, task: int, machines: IntArray, layers: IntArray, tp: int, mbs: int, samples: IntArray,
    batches: IntArray,
) -> float:  # fmt: skip
    """Return the cost of a task: its slowest replica and the gradient all-reduce.

    Args:
        tables: the constants.
        task: its row.
        machines: machine of each tasklet [dp * pp * tp].
        layers: layers per stage [pp].
        tp: shards per stage.
        mbs: samples per micro-batch.
        samples: samples per replica [dp].
        batches: decode batch per replica [dp] of generation; empty for other tasks.
    """
    size, slowest = len(layers) * tp, 0.0
    for i in range(len(samples)):
        batch = batches[i] if len(batches) else 1
        is_known = i > 0 and samples[i] == samples[i - 1] and (len(batches) == 0 or batch == batches[i - 1])
        if is_known and is_same(machines, i * size, (i - 1) * size, size):
            continue
        slowest = max(slowest, replica_s(tables, task, machines, i * size, layers, tp, mbs, samples[i], batch))
    if tables.terms[task, TRAINS]:
        slowest += gradient_s(tables, task, machines, len(samples), layers, tp)
    return slowest


@compiled
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


@compiled
def _is_same_column(machines: IntArray, first: int, second: int, width: int, dp: int) -> bool:
    for i in range(dp):
        if machines[i * width + first] != machines[i * width + second]:
            return False
    return True


@compiled
def _fullest_link_s(tables: Tables, counts: IntArray, carried: FloatArray, size: int) -> float:
    """Return the seconds until the fullest link between machines has carried all rings (`plans.cost.sharing`).

    Args:
        tables: the constants.
        counts: GPUs per machine of each ring [rings, M].
        carried: bytes over each of its edges [rings].
        size: GPUs of a ring.
    """
    num_machines, slowest = counts.shape[1], 0.0
    used = np.zeros(num_machines, dtype=np.int64)
    number = np.empty(num_machines, dtype=np.int64)
    for ring in range(len(carried)):
        used += counts[ring]
    (places,) = used.nonzero()
    for index in range(len(places)):
        number[places[index]] = index
    load = np.zeros((len(places), len(places)))
    for ring in range(len(carried)):
        (visited,) = counts[ring].nonzero()
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


@compiled
def _needs_forbidden(tables: Tables, visited: IntArray) -> bool:
    for index in range(len(visited)):
        if math.isinf(tables.latency_s[visited[index - 1], visited[index]]):
            return True
    return False


@compiled
def _shared_ring_s(tables: Tables, counts: IntArray, carried: FloatArray, ring: int) -> float:
    """Return the seconds of all rings over the same machines as one, in the best order, one after the other."""
    total = 0.0
    for other in range(len(carried)):
        if (counts[other] == counts[ring]).all():
            total += carried[other]
    return ring_of_counts_s(tables, counts[ring], total)


@compiled
def shares_s(tables: Tables, task: int, machines: IntArray, start: int, tp: int, mbs: int) -> tuple[float, float]:
    """Return rough seconds per sample of a layer and of the head on a stage: compute, TP ring, typical decoding."""
    terms = tables.terms[task]
    rate = least_at(tables.flop_per_s[task], machines, start, tp) * tp
    layer = terms[PASSES] * terms[LAYER_FLOP] / rate
    layer += terms[TP_COUNT] / mbs * tp_ring_s(tables, task, machines, start, tp, mbs)
    head = terms[PASSES] * terms[HEAD_FLOP] / rate
    if terms[DECODES]:
        # One sequence of a decode batch of typical size; only the relation between stages matters.
        steps = terms[DECODE_RESPONSE] / TYPICAL_BATCH
        bandwidth = least_at(tables.hbm_bytes_per_s[task], machines, start, tp) * tp
        layer += steps * terms[DECODE_LAYER_BYTES] / bandwidth
        head += steps * terms[DECODE_HEAD_BYTES] / bandwidth
    return layer, head


@compiled
def unit_s(
    tables: Tables, task: int, machines: IntArray, start: int, layers: IntArray, tp: int, mbs: int, batch: int
) -> float:
    """Return the seconds per sample of one replica with many samples: its slowest stage."""
    terms, pp, slowest = tables.terms[task], len(layers), 0.0
    steps = terms[DECODE_RESPONSE] / batch
    for j in range(pp):
        at, is_last = start + j * tp, j == pp - 1
        seconds = sample_s(tables, task, machines, at, layers[j], tp, is_last)
        seconds += link_s(tables, task, machines, at, layers[j], tp, mbs, is_last) / mbs
        if terms[DECODES]:
            seconds += steps * decode_step_s(tables, task, machines, at, layers[j], pp, tp, batch, is_last)
        slowest = max(slowest, seconds)
    return slowest
