"""Bytes that a group's tasks hold and need (`plans.memory`), and what is left for decoding (`plans.cost.ledger`)."""

from __future__ import annotations

import math

import numpy as np

from plans.cost.compiled.arrays import are_equal, fill, least_of
from plans.cost.compiled.jit import inner
from plans.cost.compiled.tables import (
    COPY_BYTES,
    DP,
    ELEMENT_BYTES,
    FIRST_PARAMETERS,
    GATHERED_BYTES,
    GPUS_AT,
    GROUP,
    HEAD_DIM,
    HIDDEN,
    IS_GENERATION,
    IS_SEQUENCE_PARALLEL,
    IS_TRAINING,
    KEEPS_ALL,
    KV_HEADS,
    LAST_PARAMETERS,
    LAYER_PARAMETERS,
    LAYERS_AT,
    LOGIT_BYTES,
    MICRO_BATCH,
    ONLY_PARAMETERS,
    OWNER,
    PLACES_AT,
    PP,
    REPLICATED_BYTES,
    SAMPLES_AT,
    SHARES_STATES,
    SPREADS_ALL,
    STATE_BYTES,
    TOKENS,
    TP,
    VOCABULARY,
    WIDTH,
    FloatArray,
    IntArray,
    MemoryTables,
)
from plans.memory import GATHERED_LAYERS, LAYER_ACTIVATION_BYTES


@inner
def is_spread(memory: FloatArray, dp: int) -> bool:
    """Tell whether each of `dp` replicas of a training task keeps a part of each tensor."""
    return bool(memory[IS_TRAINING] and memory[SPREADS_ALL] and dp > 1)


@inner
def parameter_bytes(memory: FloatArray, dp: int) -> float:
    """Return resident bytes per parameter of a tasklet, with `dp` replicas to share what the job lets them share."""
    if not memory[IS_TRAINING]:
        return memory[ELEMENT_BYTES]
    if is_spread(memory, dp):
        return memory[COPY_BYTES] + (memory[REPLICATED_BYTES] - memory[COPY_BYTES] + memory[STATE_BYTES]) / dp
    shards = dp if memory[SHARES_STATES] else 1
    return memory[REPLICATED_BYTES] + memory[STATE_BYTES] / shards


@inner
def stage_bytes(memory: FloatArray, layers: IntArray, stage: int, tp: int, dp: int) -> float:
    """Return resident bytes of a tasklet of a stage."""
    parameters = layers[stage] * memory[LAYER_PARAMETERS] + _end_parameters(memory, stage, len(layers))
    return parameter_bytes(memory, dp) * (parameters / tp)


@inner
def _end_parameters(memory: FloatArray, stage: int, pp: int) -> float:
    """Return the parameters of a stage that are in no layer: embedding and head."""
    if pp == 1:
        return memory[ONLY_PARAMETERS]
    if stage == 0:
        return memory[FIRST_PARAMETERS]
    return memory[LAST_PARAMETERS] if stage == pp - 1 else 0.0


@inner
def _gathered_bytes(memory: FloatArray, stage: int, pp: int, tp: int, dp: int) -> float:
    """Return what is whole at a time of spread tensors."""
    if not is_spread(memory, dp):
        return 0.0
    layers = (GATHERED_LAYERS + 1) * memory[LAYER_PARAMETERS]
    return memory[GATHERED_BYTES] * (layers + 2.0 * _end_parameters(memory, stage, pp)) / tp


@inner
def cache_bytes(memory: FloatArray, layers: int, tp: int) -> float:
    """Return key/value cache bytes of one full-length sequence on a tasklet."""
    heads = max(1.0, memory[KV_HEADS] / tp)
    return memory[TOKENS] * layers * 2.0 * heads * memory[HEAD_DIM] * memory[ELEMENT_BYTES]


@inner
def working_bytes(
    memory: FloatArray, layers: IntArray, stage: int, tp: int, dp: int, mbs: int, micro_batches: int
) -> float:
    """Return M_working of a training or inference tasklet."""
    pp, tokens = len(layers), mbs * memory[TOKENS]
    logits = tokens * memory[VOCABULARY] * memory[LOGIT_BYTES] / tp if stage == pp - 1 else 0.0
    if not memory[IS_TRAINING]:
        return memory[ELEMENT_BYTES] * tokens * memory[WIDTH] / tp + logits
    rest = logits + _gathered_bytes(memory, stage, pp, tp, dp)
    in_flight = min(micro_batches, pp - stage)
    one_layer = LAYER_ACTIVATION_BYTES * (memory[ELEMENT_BYTES] / 2.0) * tokens * memory[HIDDEN] / tp
    if memory[KEEPS_ALL]:
        return in_flight * layers[stage] * one_layer + rest
    shards = tp if memory[IS_SEQUENCE_PARALLEL] else 1
    saved = in_flight * layers[stage] * memory[ELEMENT_BYTES] * tokens * memory[HIDDEN] / shards
    return saved + one_layer + rest


@inner
def place_tasks(shape: IntArray) -> None:
    """Fill in where the GPUs, layers, samples and places of each task begin."""
    gpus = layers = samples = places = 0
    for row in shape:
        row[GPUS_AT], row[LAYERS_AT], row[SAMPLES_AT], row[PLACES_AT] = gpus, layers, samples, places
        gpus += row[DP] * row[PP] * row[TP]
        layers += row[PP]
        samples += row[DP]
        places += row[DP] * row[PP]


@inner
def gpus_of(row: IntArray, gpus: IntArray) -> IntArray:
    """Return the GPUs of a task [dp * pp * tp], given its row of the plan's shape."""
    return gpus[row[GPUS_AT] : row[GPUS_AT] + row[DP] * row[PP] * row[TP]]


@inner
def layers_of(row: IntArray, layers: IntArray) -> IntArray:
    """Return the layers per stage of a task [pp], given its row of the plan's shape."""
    return layers[row[LAYERS_AT] : row[LAYERS_AT] + row[PP]]


@inner
def samples_of(row: IntArray, samples: IntArray) -> IntArray:
    """Return the samples per replica of a task [dp], given its row of the plan's shape."""
    return samples[row[SAMPLES_AT] : row[SAMPLES_AT] + row[DP]]


@inner
def places_of(row: IntArray, places: FloatArray) -> FloatArray:
    """Return the places of a task [dp * pp, NUM_PLACE], given its row of the plan's shape."""
    return places[row[PLACES_AT] : row[PLACES_AT] + row[DP] * row[PP]]


@inner
def uses_same_places(row: IntArray, other: IntArray, gpus: IntArray) -> bool:
    """Tell whether two tasks have the same GPUs and degrees."""
    if row[DP] != other[DP] or row[PP] != other[PP] or row[TP] != other[TP]:
        return False
    return are_equal(gpus_of(row, gpus), gpus_of(other, gpus))


@inner
def is_in_place(memory: MemoryTables, task: int, shape: IntArray, gpus: IntArray, layers: IntArray) -> bool:
    """Tell whether a task uses a training task's weights: in its group, same GPUs, degrees and layers, all whole."""
    owner = np.int64(memory.tasks[task, OWNER])
    if owner < 0 or shape[owner, GROUP] != shape[task, GROUP] or not uses_same_places(shape[task], shape[owner], gpus):
        return False
    if is_spread(memory.tasks[owner], shape[owner, DP]):
        return False
    return are_equal(layers_of(shape[task], layers), layers_of(shape[owner], layers))


@inner
def hold_group(
    memory: MemoryTables, shape: IntArray, gpus: IntArray, layers: IntArray, samples: IntArray, group: int,
    resident: FloatArray, working: FloatArray,
) -> None:  # fmt: skip
    """Write what the tasks of a group hold, and the largest working set without key/value caches, by GPU [N].

    Args:
        memory: the constants.
        shape: degrees and groups of the tasks [T, NUM_SHAPE].
        gpus: GPUs of all tasks, one after the other.
        layers: layers per stage of all tasks.
        samples: samples per replica of all tasks.
        group: the group.
        resident: bytes of weights, gradients and states [N].
        working: bytes of the largest working set [N].
    """
    fill(resident, 0.0)
    fill(working, 0.0)
    for task in range(len(shape)):
        if shape[task, GROUP] == group:
            held = not is_in_place(memory, task, shape, gpus, layers)
            _hold_task(
                memory.tasks[task], shape[task], gpus_of(shape[task], gpus), layers_of(shape[task], layers),
                samples_of(shape[task], samples), held, resident, working,
            )  # fmt: skip


@inner
def _hold_task(
    memory: FloatArray, row: IntArray, gpus: IntArray, layers: IntArray, samples: IntArray, is_held: bool,
    resident: FloatArray, working: FloatArray,
) -> None:  # fmt: skip
    """Add what a task holds to the bytes of its GPUs [N], and lift their working bytes to what it needs."""
    dp, pp, tp, mbs = row[DP], row[PP], row[TP], row[MICRO_BATCH]
    for j in range(pp):
        held = stage_bytes(memory, layers, j, tp, dp) if is_held else 0.0
        known, needed = -1, 0.0
        for i in range(dp):
            # Only the first `pp` micro-batches matter.
            micro_batches = min(pp, -(-samples[i] // mbs)) if memory[IS_TRAINING] else 1
            if micro_batches != known and not memory[IS_GENERATION]:
                known, needed = micro_batches, working_bytes(memory, layers, j, tp, dp, mbs, micro_batches)
            at = (i * pp + j) * tp
            for index in range(at, at + tp):
                gpu = gpus[index]
                resident[gpu] += held
                working[gpu] = max(working[gpu], needed)


@inner
def find_rooms(
    memory: MemoryTables, row: IntArray, gpus: IntArray, layers: IntArray, resident: FloatArray, rooms: IntArray
) -> None:
    """Write the most sequences that fit together per replica of generation [dp]; 0 = not even one.

    Args:
        memory: the constants.
        row: generation's row of the plan's shape.
        gpus: its GPUs [dp * pp * tp].
        layers: its layers per stage [pp].
        resident: bytes that are held by GPU [N].
        rooms: the answer.
    """
    pp, tp = row[PP], row[TP]
    for i in range(row[DP]):
        fits = math.inf
        for j in range(pp):
            each = cache_bytes(memory.tasks[memory.generation], layers[j], tp)
            at = (i * pp + j) * tp
            for index in range(at, at + tp):
                gpu = gpus[index]
                fits = min(fits, (memory.usable_bytes[memory.machine_of[gpu]] - resident[gpu]) / each)
        rooms[i] = max(0, np.int64(math.floor(min(float(memory.most_sequences), fits))))


@inner
def group_overflow(
    memory: MemoryTables, shape: IntArray, gpus: IntArray, layers: IntArray, samples: IntArray, group: int,
    resident: FloatArray, working: FloatArray, rooms: IntArray, batches: IntArray,
) -> float:  # fmt: skip
    """Return the bytes that a group lacks, summed over GPUs.

    Arguments as in `hold_group`; afterwards `working` has the caches of decoding in it. Where the group generates,
    `rooms` and `batches` [dp] become the sequences that fit together and those that are decoded together.
    """
    hold_group(memory, shape, gpus, layers, samples, group, resident, working)
    lacking, row = 0.0, shape[memory.generation]
    if row[GROUP] == group:
        own, cut = gpus_of(row, gpus), layers_of(row, layers)
        find_rooms(memory, row, own, cut, resident, rooms)
        lacking = _add_cache(memory, row, own, cut, samples_of(row, samples), resident, working, rooms, batches)
    for gpu in range(len(memory.machine_of)):
        excess = resident[gpu] + working[gpu] - memory.capacity_bytes[memory.machine_of[gpu]]
        if excess > 0.0:
            lacking += excess
    return lacking


@inner
def _add_cache(
    memory: MemoryTables, row: IntArray, gpus: IntArray, layers: IntArray, samples: IntArray, resident: FloatArray,
    working: FloatArray, rooms: IntArray, batches: IntArray,
) -> float:  # fmt: skip
    """Write the decode batches, lift working bytes to their caches; return what one sequence per replica lacks."""
    pp, tp, lacking = row[PP], row[TP], 0.0
    for i in range(row[DP]):
        batches[i] = max(1, min(rooms[i], samples[i]))
    smallest = least_of(rooms)
    for j in range(pp):
        each = cache_bytes(memory.tasks[memory.generation], layers[j], tp)
        for i in range(row[DP]):
            at = (i * pp + j) * tp
            for index in range(at, at + tp):
                gpu = gpus[index]
                working[gpu] = max(working[gpu], batches[i] * each)
                if smallest < 1:
                    lacking += max(0.0, each - (memory.usable_bytes[memory.machine_of[gpu]] - resident[gpu]))
    return lacking
