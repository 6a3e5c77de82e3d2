"""The constants of one task's formulas: everything that does not depend on where its tasklets are.

Both cost modes share the formulas of `plans.cost.task_cost`; they differ in the constants built here. Legend of the
paper's symbols: docs/notation.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from plans.cost.calibration import Calibration
from plans.cost.flops import exact_layer_flop, head_flop, paper_layer_flop
from plans.cost.lengths import LengthMoments, moments_of
from plans.cost.model import CostModel
from plans.spec.cluster import ClusterView, FloatArray
from plans.spec.job import Job, Recompute
from plans.spec.llm import LlmShape
from plans.workflow import RlTask, TaskKind, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTerms:
    """Constants of decoding (generation only)."""

    layer_bytes: float
    """Weight bytes of one layer that every decode step reads."""
    head_bytes: float
    """Weight bytes of the head that the last stage reads per step; 0 in paper mode."""
    cache_bytes: float
    """Key/value bytes of one sequence in one layer that a step reads, before TP sharding; 0 in paper mode."""
    layer_flop: float
    """FLOP of one layer for one token of one sequence; 0 in paper mode."""
    head_flop: float
    """FLOP of the head for one token; 0 in paper mode."""
    kv_heads: int
    """Key/value heads: they cap how far TP shards the cache."""
    tp_count: int
    """All-reduces per layer and decode step; 0 in paper mode."""
    token_bytes: float
    """Bytes of one token's hidden state, sent per sequence and step; 0 in paper mode."""
    layer_overhead_s: FloatArray
    """Seconds per layer and step that are not bandwidth, by GPU [N]."""
    is_calibrated: bool
    """Whether the calibrated corrections apply."""
    lengths: LengthMoments
    """Response lengths; the paper's are the maxima."""

    def groups(self, num_stages: int) -> int:
        """Return into how many groups a decode batch is split to keep all pipeline stages busy; 1 in paper mode.

        A token must leave the last stage before the next one enters the first. With as many groups as stages each
        stage works all the time, but reads its weights once per group (correction of ours; the published formula
        reads them once).
        """
        return num_stages if self.is_calibrated else 1

    def steps(self, samples: float, decode_batch: int) -> float:
        """Return decode steps that a replica runs: s_out * samples / dbs, plus the tail of the last wave.

        Only the calibrated model has a tail: the last wave ends with its longest response.
        """
        steps = self.lengths.response * samples / decode_batch
        if self.is_calibrated:
            steps += self.lengths.longest_of(decode_batch) - self.lengths.response
        return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTerms:
    """Constants of one task."""

    task: RlTask
    """The task."""
    num_layers: int
    """Layers of its model."""
    passes: float
    """f: forward-equivalents of compute (1 forward, 3 with backward, 4 with recomputation when calibrated)."""
    layer_flop: float
    """F: forward FLOP of one layer for one sample."""
    head_flop: float
    """Forward FLOP of the vocabulary head for one sample, on the last stage; 0 in paper mode."""
    pads_micro_batches: bool
    """Whether compute counts nm * mbs samples (paper) or the samples themselves."""
    tp_count: int
    """a: all-reduces per layer and micro-batch."""
    pp_count: int
    """b: transfers between stages per micro-batch."""
    activation_bytes: float
    """B16 * s * h1: activation bytes of one sample."""
    gradient_layer_bytes: float
    """B16 * weights of one layer."""
    gradient_first_bytes: float
    """Gradient bytes of the embedding on the first stage; 0 in paper mode."""
    gradient_last_bytes: float
    """Gradient bytes of the head on the last stage; 0 in paper mode."""
    updates: int
    """Gradient all-reduces per iteration; 1 in paper mode."""
    shares_links: bool
    """Whether gradient rings that cross the same link share it; False in paper mode."""
    has_bubble: bool
    """Whether pipeline fill is charged (paper: training only)."""
    compute_flop_per_s: FloatArray
    """Effective FLOP/s by GPU [N]."""
    hbm_bytes_per_s: FloatArray
    """Effective HBM bytes/s by GPU [N]."""
    decode: DecodeTerms | None
    """Decoding constants of generation."""

    @property
    def is_training(self) -> bool:
        """Whether the task trains."""
        return self.task.kind is TaskKind.TRAINING

    def prices_like(self, other: TaskTerms) -> bool:
        """Tell whether another task has the same constants, so that equal placements cost the same."""
        names = [
            f.name for f in fields(self) if f.name not in {"task", "decode", "compute_flop_per_s", "hbm_bytes_per_s"}
        ]
        return (
            self.task.kind is other.task.kind
            and self.decode is None
            and other.decode is None
            and all(getattr(self, name) == getattr(other, name) for name in names)
            and np.array_equal(self.compute_flop_per_s, other.compute_flop_per_s)
        )

    def tp_bytes(self, micro_batch_size: int, tp: int) -> float:
        """Return cv_tp: bytes over each ring edge per all-reduce, B16 mbs s h1 * 2 (TP - 1) / TP."""
        return self.activation_bytes * micro_batch_size * (2.0 * (tp - 1) / tp)

    def pp_bytes(self, micro_batch_size: int) -> float:
        """Return cv_pp: bytes between two stages per micro-batch, B16 mbs s h1."""
        return self.activation_bytes * micro_batch_size

    def dp_bytes(self, weight_bytes: float, replicas: int, tp: int) -> float:
        """Return cv_dp: bytes over each ring edge, weight bytes * 2 (R - 1) / (R TP)."""
        return weight_bytes * (2.0 * (replicas - 1) / (replicas * tp))

    def stage_gradient_bytes(self, layers: int, *, is_first: bool, is_last: bool) -> float:
        """Return the gradient bytes of one stage before TP sharding."""
        extra = self.gradient_first_bytes * is_first + self.gradient_last_bytes * is_last
        return layers * self.gradient_layer_bytes + extra

    def compute_s(self, samples: float, layers: int, *, is_last: bool, tp: int, flop_per_s: float) -> float:
        """Return C_comp of a stage: f * samples * (layers * F + head) / (TP * comp)."""
        work = self.passes * samples * (layers * self.layer_flop + self.head_flop * is_last)
        return work / (flop_per_s * tp)


def build_terms(view: ClusterView, job: Job, task: RlTask, model: CostModel) -> TaskTerms:
    """Return the constants of a task under a model."""
    shape = shape_of(job, task)
    return _paper_terms(view, job, task, shape) if model.is_paper else _calibrated_terms(view, job, task, shape, model)


def _passes(job: Job, kind: TaskKind, *, counts_recompute: bool) -> float:
    if kind is not TaskKind.TRAINING:
        return 1.0
    return 4.0 if counts_recompute and job.training.recompute is Recompute.FULL else 3.0


def _tp_count(job: Job, kind: TaskKind) -> int:
    """Return a: 2 forward; 6 with backward and recomputation, 4 without recomputation (hetrl.md 4.1)."""
    if kind is not TaskKind.TRAINING:
        return 2
    return 6 if job.training.recompute is Recompute.FULL else 4


def _paper_terms(view: ClusterView, job: Job, task: RlTask, shape: LlmShape) -> TaskTerms:
    lengths, element = job.lengths, job.weight_bytes_per_parameter
    is_generation = task.kind is TaskKind.GENERATION
    return TaskTerms(
        task=task,
        num_layers=shape.layers,
        passes=_passes(job, task.kind, counts_recompute=False),
        # Only the prefill of generation counts as compute: s_out = 0 inside F.
        layer_flop=paper_layer_flop(shape, lengths.prompt if is_generation else lengths.total),
        head_flop=0.0,
        pads_micro_batches=True,
        tp_count=_tp_count(job, task.kind),
        pp_count=2 if task.kind is TaskKind.TRAINING else 1,
        activation_bytes=float(element * lengths.total * shape.hidden),
        gradient_layer_bytes=float(element * shape.paper_layer_parameters),
        gradient_first_bytes=0.0,
        gradient_last_bytes=0.0,
        updates=1,
        shares_links=False,
        has_bubble=task.kind is TaskKind.TRAINING,
        compute_flop_per_s=view.compute_flop_per_s,
        hbm_bytes_per_s=view.hbm_bytes_per_s,
        decode=_paper_decode(view, job, shape) if is_generation else None,
    )


def _paper_decode(view: ClusterView, job: Job, shape: LlmShape) -> DecodeTerms:
    longest = float(job.lengths.response)
    return DecodeTerms(
        layer_bytes=float(job.weight_bytes_per_parameter * shape.paper_layer_parameters),
        head_bytes=0.0,
        cache_bytes=0.0,
        layer_flop=0.0,
        head_flop=0.0,
        kv_heads=shape.kv_heads,
        tp_count=0,
        token_bytes=0.0,
        layer_overhead_s=view.hbm_bytes_per_s * 0.0,
        is_calibrated=False,
        lengths=LengthMoments(
            prompt=float(job.lengths.prompt), response=longest, response_std=0.0, response_max=longest
        ),
    )


def _calibrated_terms(view: ClusterView, job: Job, task: RlTask, shape: LlmShape, model: CostModel) -> TaskTerms:
    lengths, element = moments_of(job.lengths), job.weight_bytes_per_parameter
    kind = task.kind
    # Prefill covers the prompt only; decoding is charged per step.
    tokens = lengths.prompt if kind is TaskKind.GENERATION else lengths.total
    square = tokens * tokens if kind is TaskKind.GENERATION else lengths.total_square
    has_vocabulary = not task.has_scalar_head and kind is not TaskKind.GENERATION
    last_parameters = shape.hidden if task.has_scalar_head else shape.embedding_parameters
    return TaskTerms(
        task=task,
        num_layers=shape.layers,
        passes=_passes(job, kind, counts_recompute=True),
        layer_flop=exact_layer_flop(shape, tokens, square),
        head_flop=head_flop(shape, tokens) if has_vocabulary else 0.0,
        pads_micro_batches=False,
        tp_count=_tp_count(job, kind),
        pp_count=2 if kind is TaskKind.TRAINING else 1,
        activation_bytes=element * tokens * shape.hidden,
        gradient_layer_bytes=float(element * shape.layer_parameters),
        gradient_first_bytes=float(element * shape.embedding_parameters),
        gradient_last_bytes=float(element * last_parameters),
        updates=job.training.updates_per_iteration,
        shares_links=True,
        has_bubble=True,
        compute_flop_per_s=view.compute_flop_per_s * _by_type(view, model.calibration, kind),
        hbm_bytes_per_s=view.hbm_bytes_per_s * _hbm_by_type(view, model.calibration),
        decode=_calibrated_decode(view, job, shape, model) if kind is TaskKind.GENERATION else None,
    )


def _calibrated_decode(view: ClusterView, job: Job, shape: LlmShape, model: CostModel) -> DecodeTerms:
    lengths, element = moments_of(job.lengths, model.calibration.tail), job.weight_bytes_per_parameter
    # A sequence's cache grows from the prompt to the full length: on average half of the response is in it.
    context = lengths.prompt + lengths.response / 2.0
    return DecodeTerms(
        layer_bytes=float(element * shape.layer_parameters),
        head_bytes=float(element * shape.embedding_parameters),
        cache_bytes=context * 2.0 * shape.kv_heads * shape.head_dim * element,
        layer_flop=2.0 * (shape.layer_parameters + 2.0 * context * shape.heads * shape.head_dim),
        head_flop=2.0 * shape.embedding_parameters,
        kv_heads=shape.kv_heads,
        tp_count=2,
        token_bytes=float(element * shape.hidden),
        layer_overhead_s=_overhead_by_type(view, model.calibration),
        is_calibrated=True,
        lengths=lengths,
    )


def _by_type(view: ClusterView, calibration: Calibration, kind: TaskKind) -> FloatArray:
    return _spread(view, [calibration.of(name).compute.of(kind) for name in view.type_names])


def _hbm_by_type(view: ClusterView, calibration: Calibration) -> FloatArray:
    return _spread(view, [calibration.of(name).hbm for name in view.type_names])


def _overhead_by_type(view: ClusterView, calibration: Calibration) -> FloatArray:
    return _spread(view, [calibration.of(name).decode_layer_overhead_s for name in view.type_names])


def _spread(view: ClusterView, per_type: list[float]) -> FloatArray:
    result: FloatArray = np.array(per_type, dtype=np.float64)[view.type_of]
    return result
