"""Bytes that tasklets keep resident and need while working, and what a GPU has left for decoding.

Constraint C3 per GPU: sum of resident bytes + largest working bytes + reserve <= memory (HetRL section 2; the byte
counts are a reconstruction after Megatron and verl, hetrl.md 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plans.spec.job import Job, Optimizer, Precision, Recompute, Sharding, Training
from plans.workflow import RlTask, TaskKind, shape_of

#: Tasks that use the weights of a training task in place when both have the same GPUs, degrees and layers; placed
#: otherwise they keep a copy of their own (hetrl.md 5: zero-redundancy re-sharding).
WEIGHT_OWNERS = {
    RlTask.ACTOR_GENERATION: RlTask.ACTOR_TRAINING,
    RlTask.CRITIC_INFERENCE: RlTask.CRITIC_TRAINING,
}
#: Layers that are whole on a rank at a time where weights are spread: the one at work, and the one gathered ahead.
GATHERED_LAYERS = 2
#: Bytes of saved activations of one layer per (sample, token, hidden unit) with flash attention, 16-bit elements.
LAYER_ACTIVATION_BYTES = 34


@dataclass(frozen=True, slots=True)
class TrainingBytes:
    """Bytes per parameter while training."""

    replicated: float
    """Weights and gradients."""
    states: float
    """Optimiser states and master weights: shardable over data-parallel ranks."""
    copies: float
    """16-bit copies of the weights beside master weights, part of `replicated`: each rank makes its own, whole, and
    keeps them from the forward to the backward pass."""
    gathered: float
    """One weight, or its gradient, while a spread tensor is whole: the type of the master weights."""

    def spread(self, ranks: int) -> float:
        """Return the bytes of a rank where weights, gradients and states are spread over ranks (FSDP2)."""
        return self.copies + (self.replicated - self.copies + self.states) / ranks


def training_bytes(precision: Precision, optimizer: Optimizer) -> TrainingBytes:
    """Return bytes per parameter: BF16 mixed with Adam 2 + 4 + (4 + 4 + 4) = 18 (hetrl.md 5)."""
    moments = 0 if optimizer is Optimizer.SGD else 2
    if precision is Precision.BF16_MIXED:
        return TrainingBytes(replicated=2 + 4, states=4 + 4 * moments, copies=2, gathered=4)
    if precision is Precision.BF16:
        return TrainingBytes(replicated=2 + 2, states=2 * moments, copies=0, gathered=2)
    return TrainingBytes(replicated=4 + 4, states=4 * moments, copies=0, gathered=4)


def is_spread(training: Training, replicas: int) -> bool:
    """Tell whether a training task with so many replicas keeps a part of each tensor on each of them."""
    return training.sharding is Sharding.FULL and replicas > 1


class TaskMemory:
    """Resident and working bytes of the tasklets of one task."""

    def __init__(self, job: Job, task: RlTask) -> None:
        """Read the constants of the task's model."""
        self.task = task
        self.shape = shape_of(job, task)
        self.element = job.weight_bytes_per_parameter
        self.tokens = job.lengths.total
        self.training = job.training
        self.training_bytes = training_bytes(job.training.precision, job.training.optimizer)

    def stage_parameters(self, layers: int, *, is_first: bool, is_last: bool) -> float:
        """Return the parameters of a stage before TP sharding."""
        shape = self.shape
        first = shape.embedding_parameters if is_first else 0
        last = 0
        if is_last:
            last = shape.hidden if self.task.has_scalar_head else shape.embedding_parameters
            if is_first and shape.tied and not self.task.has_scalar_head:
                last = 0
        return float(layers * shape.layer_parameters + first + last)

    def model_bytes(self, layers: int, *, is_first: bool, is_last: bool, tp: int, dp: int) -> float:
        """Return M_model of a tasklet: weights, and gradients and optimiser states when training."""
        parameters = self.stage_parameters(layers, is_first=is_first, is_last=is_last) / tp
        return self.parameter_bytes(dp) * parameters

    def parameter_bytes(self, dp: int) -> float:
        """Return resident bytes per parameter of a tasklet, with `dp` replicas to share what the job allows."""
        if self.task.kind is not TaskKind.TRAINING:
            return self.element
        if is_spread(self.training, dp):
            return self.training_bytes.spread(dp)
        shards = dp if self.training.distributed_optimizer else 1
        return self.training_bytes.replicated + self.training_bytes.states / shards

    def working_bytes(
        self, layers: int, *, stage: int, num_stages: int, tp: int, dp: int, micro_batch_size: int, micro_batches: int
    ) -> float:
        """Return M_working of a training or inference tasklet."""
        is_last = stage == num_stages - 1
        token_bytes = float(micro_batch_size * self.tokens)
        if self.task.kind is TaskKind.TRAINING:
            in_flight = min(micro_batches, num_stages - stage)
            saved = self._saved_bytes(layers, tp, token_bytes, in_flight)
            gathered = self._gathered_bytes(tp, dp, is_first=stage == 0, is_last=is_last)
            return saved + gathered + self._logit_bytes(token_bytes, tp, is_last)
        width = 4 * self.shape.hidden + 2 * self.shape.intermediate
        return self.element * token_bytes * width / tp + self._logit_bytes(token_bytes, tp, is_last)

    def _gathered_bytes(self, tp: int, dp: int, *, is_first: bool, is_last: bool) -> float:
        """Return what is whole at a time of spread tensors: some layers, one layer's gradients, all that is no layer.

        Embedding and head stay whole from the forward to the end of the backward pass, their gradients with them.
        """
        if not is_spread(self.training, dp):
            return 0.0
        layers = (GATHERED_LAYERS + 1) * self.shape.layer_parameters
        rest = 2 * self.stage_parameters(0, is_first=is_first, is_last=is_last)
        return self.training_bytes.gathered * (layers + rest) / tp

    def _saved_bytes(self, layers: int, tp: int, token_bytes: float, in_flight: int) -> float:
        one_layer = LAYER_ACTIVATION_BYTES * (self.element / 2) * token_bytes * self.shape.hidden / tp
        if self.training.recompute is Recompute.NONE:
            return in_flight * layers * one_layer
        shards = tp if self.training.sequence_parallel else 1
        return in_flight * layers * self.element * token_bytes * self.shape.hidden / shards + one_layer

    def _logit_bytes(self, token_bytes: float, tp: int, is_last: bool) -> float:
        if not is_last or self.task.has_scalar_head:
            return 0.0
        # Training keeps the logits and an FP32 copy; inference one copy in the model's format.
        width = self.element + 4 if self.task.kind is TaskKind.TRAINING else self.element
        return token_bytes * self.shape.vocab * width / tp

    def cache_bytes(self, layers: int, tp: int) -> float:
        """Return key/value cache bytes of one full-length sequence on a tasklet."""
        heads = max(1.0, self.shape.kv_heads / tp)
        return float(self.tokens * layers * 2 * heads * self.shape.head_dim * self.element)


def usable_bytes(memory_bytes: float, reserve_bytes: float, memory_fraction: float) -> float:
    """Return what weights and cache may fill together on a generation GPU."""
    return min(memory_fraction * memory_bytes, memory_bytes - reserve_bytes)


def decode_batch_of(free_bytes: float, sequence_bytes: float, cap: int) -> int:
    """Return how many sequences fit: min(cap, floor(free / bytes per sequence)); 0 when not even one does."""
    return max(0, min(cap, math.floor(free_bytes / sequence_bytes)))
