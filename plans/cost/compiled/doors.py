"""What Python calls of the cost model: each function is machine code of its own, with all that it needs.

The tables are given as words (`plans.cost.compiled.words`). Arrays are borrowed for the call.
"""

from __future__ import annotations

from plans.cost.compiled import balance, memory, rings, stages, transfer, whole_plan
from plans.cost.compiled.jit import borrowed, compiled
from plans.cost.compiled.tables import FloatArray, IntArray, MemoryTables, Tables
from plans.cost.compiled.words import reader_of

tables_at = reader_of(Tables)
_memory_at = reader_of(MemoryTables)


@compiled
def price_plan(
    words: IntArray, strategies: IntArray, wanted: int, shape: IntArray, gpus: IntArray, layers: IntArray,
    samples: IntArray, rooms: IntArray, batches: IntArray, seconds: FloatArray,
) -> float:  # fmt: skip
    """Balance or price a plan, or both; return the bytes that it lacks: `whole_plan.price_plan`."""
    return whole_plan.price_plan(
        tables_at(words), borrowed(strategies), wanted, borrowed(shape), borrowed(gpus), borrowed(layers),
        borrowed(samples), borrowed(rooms), borrowed(batches), borrowed(seconds),
    )  # fmt: skip


@compiled
def price_alone(
    words: IntArray, strategies: IntArray, task: int, row: IntArray, gpus: IntArray, held_bytes: float
) -> tuple[float, float]:
    """Return seconds of one task alone and its share of memory: `whole_plan.price_alone`."""
    return whole_plan.price_alone(
        tables_at(words), borrowed(strategies), task, borrowed(row), borrowed(gpus), held_bytes
    )


@compiled
def task_s(
    words: IntArray, task: int, machines: IntArray, layers: IntArray, tp: int, mbs: int, samples: IntArray,
    batches: IntArray,
) -> float:  # fmt: skip
    """Return the cost of a task: `stages.task_s`."""
    return stages.task_s(
        tables_at(words), task, borrowed(machines), borrowed(layers), tp, mbs, borrowed(samples), borrowed(batches)
    )


@compiled
def stage_totals(
    words: IntArray, task: int, machines: IntArray, layers: IntArray, tp: int, mbs: int, samples: int, batch: int,
    totals: FloatArray,
) -> float:  # fmt: skip
    """Write the seconds of each stage of a replica; return its pipeline fill: `stages.stage_totals`."""
    return stages.stage_totals(
        tables_at(words), task, borrowed(machines), borrowed(layers), tp, mbs, samples, batch, borrowed(totals)
    )


@compiled
def transfer_s(
    words: IntArray, row: IntArray, gpus: IntArray, layers: IntArray, row_g: IntArray, gpus_g: IntArray,
    layers_g: IntArray,
) -> float:  # fmt: skip
    """Return C_reshard or C_sync: `transfer.transfer_s`."""
    return transfer.transfer_s(
        tables_at(words), borrowed(row), borrowed(gpus), borrowed(layers), borrowed(row_g), borrowed(gpus_g),
        borrowed(layers_g),
    )  # fmt: skip


@compiled
def split_layers(
    words: IntArray, task: int, machines: IntArray, dp: int, pp: int, tp: int, mbs: int, split: int, layers: IntArray
) -> bool:
    """Write the layers per stage [pp]: `balance.split_layers`."""
    return balance.split_layers(tables_at(words), task, borrowed(machines), dp, pp, tp, mbs, split, borrowed(layers))


@compiled
def resident_share(words: IntArray, task: int, machines: IntArray, dp: int, layers: IntArray, tp: int) -> float:
    """Return the largest share of a GPU's memory that its shard of the model fills: `balance.resident_share`."""
    return balance.resident_share(tables_at(words), task, borrowed(machines), dp, borrowed(layers), tp)


@compiled
def share_samples(total: int, units: FloatArray, samples: IntArray) -> None:
    """Write samples per replica that minimise the largest `samples * unit`: `balance.share_samples`."""
    balance.share_samples(total, borrowed(units), borrowed(samples))


@compiled
def group_overflow(
    words: IntArray, shape: IntArray, gpus: IntArray, layers: IntArray, samples: IntArray, group: int,
    resident: FloatArray, working: FloatArray, rooms: IntArray, batches: IntArray,
) -> float:  # fmt: skip
    """Place the tasks; return the bytes that a group lacks: `memory.group_overflow`; `words`: of `MemoryTables`."""
    shape = borrowed(shape)
    memory.place_tasks(shape)
    return memory.group_overflow(
        _memory_at(words), shape, borrowed(gpus), borrowed(layers), borrowed(samples), group, borrowed(resident),
        borrowed(working), borrowed(rooms), borrowed(batches),
    )  # fmt: skip


@compiled
def keep_rings(words: IntArray, edges: FloatArray) -> None:
    """Keep the first rings that were asked for, with latency and seconds per byte of their slowest edges [rings, 2]."""
    rings.keep_rings(tables_at(words).rings, borrowed(edges))
