"""Price of a whole plan: balance, memory, times of the tasks, transfer, phases (`plans.cost.price`).

A plan is given by its shape (a row per task), and the GPUs, layers and samples of its tasks one after the other.
"""

from __future__ import annotations

import math

import numpy as np

from plans.cost.compiled.arrays import copy_to, largest_of, least_of
from plans.cost.compiled.balance import even_samples, placed_split, resident_share, speed_samples
from plans.cost.compiled.jit import inner
from plans.cost.compiled.memory import (
    cache_bytes,
    find_rooms,
    gpus_of,
    group_overflow,
    hold_group,
    layers_of,
    place_tasks,
    places_of,
    samples_of,
    stage_bytes,
    uses_same_places,
)
from plans.cost.compiled.places import NUM_PLACE, least_at, measure_places
from plans.cost.compiled.stages import placed_task_s
from plans.cost.compiled.tables import (
    DP,
    ETA,
    GENERATION,
    GROUP,
    HAS_ETA,
    IS_ASYNC,
    MICRO_BATCH,
    PLACES_AT,
    PP,
    SAMPLES,
    SPLIT,
    SPLIT_EVEN,
    TP,
    TRAINING,
    TRAINS,
    FloatArray,
    IntArray,
    Tables,
)
from plans.cost.compiled.transfer import transfer_s

#: Which strategies of load balancing are used (`Balancing`): entries of `strategies`.
GENERATION_SAMPLES, OTHER_SAMPLES, LAYERS = range(3)
#: What is wanted of `price_plan`.
PRICE, BALANCE, SCORE = range(3)
#: Entries of the seconds of a plan; those of its tasks follow.
ITERATION_S, GENERATION_S, INFERENCE_S, TRAINING_S, TRANSFER_S, TASKS_S = range(6)


@inner
def machines_of(tables: Tables, gpus: IntArray) -> IntArray:
    """Return the machine of each GPU."""
    machines = np.empty(len(gpus), dtype=np.int64)
    for index in range(len(gpus)):
        machines[index] = tables.machine_of[gpus[index]]
    return machines


@inner
def measure_plan(tables: Tables, shape: IntArray, machines: IntArray) -> FloatArray:
    """Fill in where everything of the tasks begins; return the places of all tasks, one after the other."""
    place_tasks(shape)
    last = shape[-1]
    places = np.empty((last[PLACES_AT] + last[DP] * last[PP], NUM_PLACE))
    for task in range(len(shape)):
        row = shape[task]
        own = gpus_of(row, machines)
        measure_places(tables, task, own, row[DP], row[PP], row[TP], row[MICRO_BATCH], places_of(row, places))
    return places


@inner
def balance_placed(
    tables: Tables, strategies: IntArray, shape: IntArray, gpus: IntArray, machines: IntArray, places: FloatArray,
    layers: IntArray, samples: IntArray,
) -> bool:  # fmt: skip
    """Write layers and samples of all tasks; False where a task has fewer layers or samples than parts."""
    generation = tables.facts[GENERATION]
    for task in range(len(shape)):
        row = shape[task]
        if task != generation and not _balance_task(
            tables, strategies, task, row, gpus_of(row, machines), places_of(row, places), layers, samples
        ):
            return False
    return _balance_generation(tables, strategies, shape, gpus, machines, places, layers, samples)


@inner
def _balance_task(
    tables: Tables, strategies: IntArray, task: int, row: IntArray, machines: IntArray, places: FloatArray,
    layers: IntArray, samples: IntArray,
) -> bool:  # fmt: skip
    """Write layers and samples of a task other than generation, given its own machines and places."""
    total, cut, mbs = tables.facts[SAMPLES], layers_of(row, layers), row[MICRO_BATCH]
    split = row[SPLIT] if strategies[LAYERS] else SPLIT_EVEN
    if row[DP] > total or not placed_split(tables, task, machines, places, row[DP], row[PP], row[TP], mbs, split, cut):
        return False
    if not strategies[OTHER_SAMPLES]:
        even_samples(total, samples_of(row, samples))
    else:
        none = np.empty(0, dtype=np.int64)
        speed_samples(tables, task, machines, places, cut, row[TP], mbs, none, total, samples_of(row, samples))
    return True


@inner
def _balance_generation(
    tables: Tables, strategies: IntArray, shape: IntArray, gpus: IntArray, machines: IntArray, places: FloatArray,
    layers: IntArray, samples: IntArray,
) -> bool:  # fmt: skip
    """Write layers and samples of generation, the other tasks being done; in the training's places with its layers."""
    task, total = tables.facts[GENERATION], tables.facts[SAMPLES]
    row, training = shape[task], shape[tables.facts[TRAINING]]
    own, placed = gpus_of(row, machines), places_of(row, places)
    cut, shares, mbs = layers_of(row, layers), samples_of(row, samples), row[MICRO_BATCH]
    if row[DP] > total:
        return False
    if uses_same_places(row, training, gpus):
        copy_to(cut, layers_of(training, layers))
    else:
        split = row[SPLIT] if strategies[LAYERS] else SPLIT_EVEN
        if not placed_split(tables, task, own, placed, row[DP], row[PP], row[TP], mbs, split, cut):
            return False
    even_samples(total, shares)
    if strategies[GENERATION_SAMPLES] and row[DP] > 1:
        num_gpus = len(tables.machine_of)
        resident, working, rooms = np.empty(num_gpus), np.empty(num_gpus), np.empty(row[DP], dtype=np.int64)
        hold_group(tables.memory, shape, gpus, layers, samples, row[GROUP], resident, working)
        find_rooms(tables.memory, row, gpus_of(row, gpus), cut, resident, rooms)
        speed_samples(tables, task, own, placed, cut, row[TP], mbs, rooms, total, shares)
    return True


@inner
def plan_overflow(
    tables: Tables, shape: IntArray, gpus: IntArray, layers: IntArray, samples: IntArray, rooms: IntArray,
    batches: IntArray,
) -> float:  # fmt: skip
    """Return the bytes that the plan lacks; write room and decode batch of each generation replica [dp]."""
    num_gpus, overflow = len(tables.machine_of), 0.0
    resident, working = np.empty(num_gpus), np.empty(num_gpus)
    num_groups = 0
    for row in shape:
        num_groups = max(num_groups, row[GROUP] + 1)
    for group in range(num_groups):
        overflow += group_overflow(
            tables.memory, shape, gpus, layers, samples, group, resident, working, rooms, batches
        )
    return overflow


@inner
def plan_seconds(
    tables: Tables, shape: IntArray, gpus: IntArray, machines: IntArray, places: FloatArray, layers: IntArray,
    samples: IntArray, batches: IntArray, seconds: FloatArray,
) -> None:  # fmt: skip
    """Write the seconds of iteration, phases, transfer and tasks."""
    none = np.empty(0, dtype=np.int64)
    generation, training = tables.facts[GENERATION], tables.facts[TRAINING]
    for task in range(len(shape)):
        row = shape[task]
        seconds[TASKS_S + task] = placed_task_s(
            tables, task, gpus_of(row, machines), places_of(row, places), layers_of(row, layers), row[TP],
            row[MICRO_BATCH], samples_of(row, samples), batches if task == generation else none,
        )  # fmt: skip
    source, target = shape[training], shape[generation]
    moved = transfer_s(
        tables, source, gpus_of(source, gpus), layers_of(source, layers), target, gpus_of(target, gpus),
        layers_of(target, layers),
    )  # fmt: skip
    decoding = seconds[TASKS_S + generation]
    phases = np.empty(2)
    for trains in range(2):
        phases[trains] = _phi(tables, shape, seconds[TASKS_S:], trains)
    inference, learning = phases[0], phases[1]
    if tables.facts[IS_ASYNC]:
        seconds[ITERATION_S] = max(decoding, inference + learning) + moved
    else:
        seconds[ITERATION_S] = decoding + inference + learning + moved
    seconds[GENERATION_S], seconds[INFERENCE_S], seconds[TRAINING_S] = decoding, inference, learning
    seconds[TRANSFER_S] = moved


@inner
def _phi(tables: Tables, shape: IntArray, task_seconds: FloatArray, trains: int) -> float:
    """Return Phi of the training tasks (`trains`: 1), or of those of inference (0) (`plans.cost.iteration.phi`)."""
    longest = total = 0.0
    per_group = np.zeros(len(shape))
    for task in range(len(shape)):
        if task != tables.facts[GENERATION] and (tables.terms[task, TRAINS] != 0.0) == trains:
            longest = max(longest, task_seconds[task])
            total += task_seconds[task]
            per_group[shape[task, GROUP]] += task_seconds[task]
    if tables.facts[HAS_ETA]:
        return longest + (1.0 - tables.numbers[ETA]) * (total - longest)
    return largest_of(per_group)


@inner
def price_plan(
    tables: Tables, strategies: IntArray, wanted: int, shape: IntArray, gpus: IntArray, layers: IntArray,
    samples: IntArray, rooms: IntArray, batches: IntArray, seconds: FloatArray,
) -> float:  # fmt: skip
    """Return the bytes that a plan lacks; infinite where a task has fewer layers or samples than parts.

    Args:
        tables: the constants.
        strategies: which of the strategies of load balancing are used [3].
        wanted: PRICE of a plan as it is; BALANCE only; SCORE of a candidate, balanced, whose seconds are not asked for
            where it lacks memory.
        shape: a row per task [T, NUM_SHAPE].
        gpus: GPUs of all tasks, one after the other.
        layers: layers per stage of all tasks: given, or written by balancing.
        samples: samples per replica of all tasks: given, or written by balancing.
        rooms: written: sequences that fit together on each replica of generation [at least dp].
        batches: written: sequences that are decoded together [at least dp].
        seconds: written: seconds of iteration, phases, transfer and tasks [TASKS_S + T].
    """
    machines = machines_of(tables, gpus)
    places = measure_plan(tables, shape, machines)
    if wanted != PRICE and not balance_placed(tables, strategies, shape, gpus, machines, places, layers, samples):
        return math.inf
    if wanted == BALANCE:
        return 0.0
    dp = shape[tables.facts[GENERATION], DP]
    overflow = plan_overflow(tables, shape, gpus, layers, samples, rooms[:dp], batches[:dp])
    if wanted == PRICE or overflow <= 0.0:
        plan_seconds(tables, shape, gpus, machines, places, layers, samples, batches[:dp], seconds)
    return overflow


@inner
def price_alone(
    tables: Tables, strategies: IntArray, task: int, row: IntArray, gpus: IntArray, held_bytes: float
) -> tuple[float, float]:
    """Return seconds of one task alone and the largest share of a GPU's memory that its model fills.

    `held_bytes`: bytes of other models on each GPU, which take room from the key/value cache. Both infinite where the
    task can't be placed or not even one sequence fits.
    """
    dp, pp, tp, mbs, total = row[DP], row[PP], row[TP], row[MICRO_BATCH], tables.facts[SAMPLES]
    machines, layers = machines_of(tables, gpus), np.empty(pp, dtype=np.int64)
    split = row[SPLIT] if strategies[LAYERS] else SPLIT_EVEN
    if dp > total:
        return math.inf, math.inf
    places = np.empty((dp * pp, NUM_PLACE))
    measure_places(tables, task, machines, dp, pp, tp, mbs, places)
    if not placed_split(tables, task, machines, places, dp, pp, tp, mbs, split, layers):
        return math.inf, math.inf
    share = resident_share(tables, task, machines, dp, layers, tp)
    samples, batches = np.empty(dp, dtype=np.int64), np.empty(0, dtype=np.int64)
    is_generation = task == tables.facts[GENERATION]
    rooms = np.empty(dp if is_generation else 0, dtype=np.int64)
    if is_generation:
        _lone_rooms(tables, task, machines, layers, tp, held_bytes, rooms)
        if least_of(rooms) < 1:
            return math.inf, math.inf
    if strategies[GENERATION_SAMPLES if is_generation else OTHER_SAMPLES]:
        speed_samples(tables, task, machines, places, layers, tp, mbs, rooms, total, samples)
    else:
        even_samples(total, samples)
    if is_generation:
        batches = np.empty(dp, dtype=np.int64)
        for i in range(dp):
            batches[i] = max(1, min(rooms[i], samples[i]))
    return placed_task_s(tables, task, machines, places, layers, tp, mbs, samples, batches), share


@inner
def _lone_rooms(
    tables: Tables, task: int, machines: IntArray, layers: IntArray, tp: int, held_bytes: float, rooms: IntArray
) -> None:
    """Write how many sequences each replica of generation can decode together beside what is held [dp]."""
    memory, pp, dp = tables.memory, len(layers), len(rooms)
    for i in range(dp):
        fits = math.inf
        for j in range(pp):
            held = stage_bytes(memory.tasks[task], layers, j, tp, dp) + held_bytes
            usable = least_at(memory.usable_bytes, machines, (i * pp + j) * tp, tp)
            fits = min(fits, (usable - held) / cache_bytes(memory.tasks[task], layers[j], tp))
        rooms[i] = max(0, np.int64(math.floor(min(float(memory.most_sequences), fits))))
