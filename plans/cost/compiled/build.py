"""From a cluster, a job and a model to the arrays that the compiled cost model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from plans.cost.collectives import LinkTimes
from plans.cost.compiled.tables import (
    DIRECT,
    NUM_MEMORY,
    NUM_TERMS,
    PER_REGION,
    RINGS_ASKED,
    RINGS_KEPT,
    SEQUENTIAL,
    FloatArray,
    IntArray,
    MemoryTables,
    Rings,
    Tables,
)
from plans.cost.model import CostModel, Fanout
from plans.cost.terms import DecodeTerms, TaskTerms
from plans.cost.transfer import WeightLine
from plans.memory import WEIGHT_OWNERS, TaskMemory, usable_bytes
from plans.spec.cluster import ClusterView
from plans.spec.job import Job, Mode, Recompute, Sharding
from plans.workflow import RlTask, TaskKind, shape_of, workflow_of

_FANOUTS = {Fanout.DIRECT: DIRECT, Fanout.SEQUENTIAL: SEQUENTIAL, Fanout.PER_REGION: PER_REGION}


def build_memory(view: ClusterView, job: Job) -> MemoryTables:
    """Return what the memory of plans depends on."""
    tasks = workflow_of(job).tasks
    usable = [
        usable_bytes(float(memory), float(reserve), job.generation.memory_fraction)
        for memory, reserve in zip(view.memory_bytes, view.reserve_bytes, strict=True)
    ]
    return MemoryTables(
        tasks=np.array([_memory_row(job, task, tasks) for task in tasks]),
        machine_of=view.machine_of.astype(np.int64),
        capacity_bytes=_by_machine(view, view.memory_bytes - view.reserve_bytes),
        usable_bytes=_by_machine(view, np.array(usable)),
        most_sequences=job.generation.max_num_seqs,
        generation=tasks.index(RlTask.ACTOR_GENERATION),
    )


def build_tables(
    view: ClusterView,
    job: Job,
    model: CostModel,
    links: LinkTimes,
    terms: Mapping[RlTask, TaskTerms],
    memory: MemoryTables,
) -> Tables:
    """Return all that the price of plans depends on."""
    tasks = list(terms)
    decode = terms[RlTask.ACTOR_GENERATION].decode
    if decode is None:
        raise ValueError("the terms of generation have no decoding; build them with build_terms")
    return Tables(
        machine_of=memory.machine_of,
        latency_s=np.array(links.latency_s),
        s_per_byte=np.array(links.s_per_byte),
        link_classes=np.ascontiguousarray(
            np.unique(np.stack([links.latency_s.ravel(), links.s_per_byte.ravel()], axis=1), axis=0).T
        ),
        region=view.region_of_machine.astype(np.int64),
        flop_per_s=np.array([_by_machine(view, terms[task].compute_flop_per_s) for task in tasks]),
        hbm_bytes_per_s=np.array([_by_machine(view, terms[task].hbm_bytes_per_s) for task in tasks]),
        overhead_s=_by_machine(view, decode.layer_overhead_s),
        terms=np.array([_terms_row(terms[task]) for task in tasks]),
        memory=memory,
        tails=tails_up_to(decode, min(job.generation.max_num_seqs, job.num_samples)),
        facts=_facts(job, model, links, tasks),
        numbers=_numbers(job, model),
        rings=_no_rings(len(view.machine_names)),
    )


def tails_up_to(decode: DecodeTerms, batch: int) -> FloatArray:
    """Return the decode steps of the last wave's tail for batches from 0 (unused) to `batch`."""
    return np.array([0.0, *(decode.steps(0.0, size) for size in range(1, batch + 1))])


def _by_machine(view: ClusterView, values: FloatArray) -> FloatArray:
    """Return values by machine [M] of values by GPU [N]: GPUs of a machine are alike."""
    first = view.machine_of.searchsorted(range(len(view.machine_names)))
    return np.array(values[first], dtype=np.float64)


def _terms_row(terms: TaskTerms) -> FloatArray:
    """Return the constants of a task in the order of the columns."""
    row = [
        terms.passes, terms.layer_flop, terms.head_flop, terms.pads_micro_batches, terms.tp_count, terms.pp_count,
        terms.activation_bytes, terms.gradient_layer_bytes, terms.gradient_first_bytes, terms.gradient_last_bytes,
        terms.updates, terms.shares_links, terms.has_bubble, terms.is_training, terms.num_layers,
    ]  # fmt: skip
    decode = terms.decode
    if decode is not None:
        row += [
            1.0, decode.layer_bytes, decode.head_bytes, decode.cache_bytes, decode.layer_flop, decode.head_flop,
            decode.kv_heads, decode.tp_count, decode.token_bytes, decode.is_calibrated, decode.lengths.response,
        ]  # fmt: skip
    found = np.zeros(NUM_TERMS)
    found[: len(row)] = row
    return found


def _memory_row(job: Job, task: RlTask, tasks: Sequence[RlTask]) -> FloatArray:
    """Return the memory constants of a task in the order of the columns."""
    model, training = TaskMemory(job, task), job.training
    shape, owner = model.shape, WEIGHT_OWNERS.get(task)
    extra = [
        model.stage_parameters(0, is_first=is_first, is_last=is_last)
        for is_first, is_last in ((True, False), (False, True), (True, True))
    ]
    is_training = task.kind is TaskKind.TRAINING
    # Training keeps the logits and an FP32 copy.
    logit_bytes = 0 if task.has_scalar_head else model.element + (4 if is_training else 0)
    row = [
        shape.layer_parameters, *extra, model.training_bytes.replicated, model.training_bytes.states,
        training.distributed_optimizer, is_training, task.kind is TaskKind.GENERATION, model.element, model.tokens,
        shape.hidden, 4 * shape.hidden + 2 * shape.intermediate, shape.vocab, logit_bytes,
        training.recompute is Recompute.NONE, training.sequence_parallel, shape.kv_heads, shape.head_dim,
        tasks.index(owner) if owner is not None and owner in tasks else -1,
        training.sharding is Sharding.FULL, model.training_bytes.copies, model.training_bytes.gathered,
    ]  # fmt: skip
    found = np.zeros(NUM_MEMORY)
    found[:] = row
    return found


def _facts(job: Job, model: CostModel, links: LinkTimes, tasks: Sequence[RlTask]) -> IntArray:
    shape = shape_of(job, RlTask.ACTOR_TRAINING)
    return np.array(
        [
            links.latency_per_step, job.num_samples, _FANOUTS[model.fanout], tasks.index(RlTask.ACTOR_GENERATION),
            tasks.index(RlTask.ACTOR_TRAINING), job.mode is Mode.ASYNC, model.eta is not None, shape.layers,
        ],
        dtype=np.int64,
    )  # fmt: skip


def _numbers(job: Job, model: CostModel) -> FloatArray:
    line = WeightLine.of(shape_of(job, RlTask.ACTOR_TRAINING), job.weight_bytes_per_parameter)
    eta = 0.0 if model.eta is None else model.eta
    return np.array(
        [eta, model.delta_fraction, model.sync_factor, line.embedding_bytes, line.layer_bytes, line.head_bytes]
    )


def _no_rings(num_machines: int) -> Rings:
    return Rings(
        keys=np.zeros((RINGS_KEPT, 2), dtype=np.uint64),
        edges=np.zeros((RINGS_KEPT, 2)),
        asked_keys=np.zeros((RINGS_ASKED, 2), dtype=np.uint64),
        asked_counts=np.zeros((RINGS_ASKED, num_machines), dtype=np.int64),
        asked_bytes=np.zeros(RINGS_ASKED),
        num_asked=np.zeros(1, dtype=np.int64),
    )
