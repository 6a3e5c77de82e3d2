"""The planner's part of the job document `motley.job/1`.

Owns: algorithm, mode, model shapes, batch, lengths, and the settings of training and generation that change time
or memory. The execution sections are named here so that a typo is refused, and carried unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from plans.errors import Fault, FaultKind
from plans.spec.llm import BUILT_IN_SHAPES, MOST, LlmShape
from plans.spec.model import SpecModel, fingerprint

#: Top-level sections that execution reads and the planner carries unread.
EXECUTION_SECTIONS = frozenset({
    "iterations", "seed", "source", "data", "template", "rewards", "sampling", "optimizer", "grpo", "ppo",
    "asynchrony", "correction", "evaluation", "storage", "engines", "replan", "profile", "limits", "metrics",
})  # fmt: skip


class Algorithm(StrEnum):
    """RL algorithm."""

    PPO = "ppo"
    GRPO = "grpo"


class Mode(StrEnum):
    """Whether generation and training alternate or overlap."""

    SYNC = "sync"
    ASYNC = "async"


class Precision(StrEnum):
    """Number formats of training; generation and inference use the 2-byte or 4-byte weights of the same choice."""

    BF16_MIXED = "bf16-mixed"
    BF16 = "bf16"
    FP32 = "fp32"


class Recompute(StrEnum):
    """Whether activations are recomputed in the backward pass."""

    FULL = "full"
    NONE = "none"


class Sharding(StrEnum):
    """What data-parallel ranks of training share out among them, beside the samples."""

    NONE = "none"
    FULL = "full"


class Optimizer(StrEnum):
    """Optimiser, as far as its memory matters."""

    ADAM = "adam"
    ADAMW = "adamw"
    SGD = "sgd"


class ModelSpec(SpecModel):
    """One model of the workflow."""

    shape: str | LlmShape
    """A built-in shape name or explicit numbers."""
    path: str | None = None
    """Where execution finds the weights; unread by the planner."""
    revision: str | None = None
    """Revision of the weights; unread by the planner."""
    tokenizer: str | None = None
    """Where execution finds the tokenizer; unread by the planner."""

    @property
    def llm(self) -> LlmShape:
        """The shape's numbers."""
        return self.shape if isinstance(self.shape, LlmShape) else BUILT_IN_SHAPES[self.shape]


class VerifierSpec(SpecModel):
    """A reward given by a rule on CPU; it needs no GPU task."""

    verifier: str = Field(min_length=1)
    """Name of the rule."""


def _kind_of_reward(value: object) -> str:
    """Tell a rule from a model by the one field that only rules have."""
    is_rule = isinstance(value, VerifierSpec) or (isinstance(value, Mapping) and "verifier" in value)
    return "VerifierSpec" if is_rule else "ModelSpec"


class JobModels(SpecModel):
    """The models of the workflow."""

    actor: ModelSpec
    """The policy."""
    critic: ModelSpec | None = None
    """The value model; PPO only."""
    reference: ModelSpec
    """The frozen policy of the KL term."""
    reward: Annotated[
        Annotated[ModelSpec, Tag("ModelSpec")] | Annotated[VerifierSpec, Tag("VerifierSpec")],
        Discriminator(_kind_of_reward),
    ]
    """Reward model, or a rule."""


class Batch(SpecModel):
    """Size of one iteration."""

    prompts: int = Field(ge=1, le=MOST)
    """Prompts per iteration."""
    responses_per_prompt: int = Field(ge=1, le=MOST)
    """Completions per prompt."""


class Lengths(SpecModel):
    """Token counts: maxima, and optionally what is known of their distribution."""

    prompt: int = Field(ge=1, le=MOST)
    """Longest prompt."""
    response: int = Field(ge=1, le=MOST)
    """Longest response."""
    prompt_mean: float | None = Field(default=None, gt=0)
    """Mean prompt length; read by the calibrated model and the simulator; absent = the maximum."""
    response_mean: float | None = Field(default=None, gt=0)
    """Mean response length; read by the calibrated model and the simulator; absent = the maximum."""
    response_std: float | None = Field(default=None, ge=0)
    """Standard deviation of response lengths; absent = 0."""

    @property
    def total(self) -> int:
        """Longest sequence, s = s_in + s_out."""
        return self.prompt + self.response


class Training(SpecModel):
    """Settings of the training tasks that change time or memory."""

    micro_batch_size: int = Field(default=1, ge=1, le=MOST)
    """Samples per micro-batch."""
    recompute: Recompute = Recompute.FULL
    """Activation recomputation."""
    optimizer: Optimizer = Optimizer.ADAM
    """Optimiser."""
    precision: Precision = Precision.BF16_MIXED
    """Number formats."""
    updates_per_iteration: int = Field(default=1, ge=1, le=MOST)
    """Optimiser steps per iteration (PPO mini-batches times epochs); read by the calibrated model."""
    distributed_optimizer: bool = False
    """Whether optimiser states are sharded over data-parallel ranks."""
    sharding: Sharding = Sharding.NONE
    """`full`: weights, gradients and optimiser states are spread over data-parallel ranks (FSDP2); `none`: as
    `distributed_optimizer` says."""
    sequence_parallel: bool = True
    """Whether saved activations are sharded over tensor-parallel ranks."""


class Generation(SpecModel):
    """Settings of the generation engine that change time or memory."""

    max_num_seqs: int = Field(default=256, ge=1, le=MOST)
    """Cap of the decode batch."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of GPU memory that weights and KV cache may fill together."""


class Job(SpecModel):
    """What one training run does per iteration, as far as placement depends on it."""

    format: Literal["motley.job/1"] = "motley.job/1"
    """Kind and version of the document."""
    name: str
    """Name for people; not part of the fingerprint."""
    algorithm: Algorithm
    """RL algorithm."""
    mode: Mode = Mode.SYNC
    """Synchronous or asynchronous."""
    max_staleness: int = Field(default=0, ge=0)
    """Policy versions that a rollout may lag when it is trained on: 0 in sync mode, >= 1 in async mode."""
    models: JobModels
    """Models."""
    batch: Batch
    """Size of one iteration."""
    lengths: Lengths
    """Token counts."""
    training: Training = Training()
    """Training settings."""
    generation: Generation = Generation()
    """Generation settings."""
    execution: dict[str, JsonValue] = Field(default_factory=dict)
    """The execution sections of the file, by name, unread."""

    @property
    def num_samples(self) -> int:
        """Completions per iteration."""
        return self.batch.prompts * self.batch.responses_per_prompt

    @property
    def weight_bytes_per_parameter(self) -> int:
        """Bytes of one weight or activation element (the paper's B16): 2, or 4 in fp32."""
        return 4 if self.training.precision is Precision.FP32 else 2

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what prices and placements depend on; name, paths and execution sections are left out."""
        return fingerprint(self._content())

    def _content(self) -> dict[str, object]:
        content = self.model_dump(mode="json", exclude={"name", "models", "execution"})
        if self.training.sharding is Sharding.NONE:
            del content["training"]["sharding"]  # the fingerprint of a job without it is older than the field
        content["models"] = {role: _model_content(model) for role, model in self._models().items()}
        return content

    def _models(self) -> Mapping[str, ModelSpec | VerifierSpec]:
        models: dict[str, ModelSpec | VerifierSpec] = {"actor": self.models.actor, "reference": self.models.reference}
        models["reward"] = self.models.reward
        if self.models.critic is not None:
            models["critic"] = self.models.critic
        return models


def job_faults(job: Job) -> list[Fault]:
    """Return every cross-field fault of a job."""
    return [*_mode_faults(job), *_model_faults(job), *_length_faults(job)]


def _model_content(model: ModelSpec | VerifierSpec) -> dict[str, object]:
    if isinstance(model, VerifierSpec):
        return {"verifier": model.verifier}
    return model.llm.model_dump(mode="json")


def _mode_faults(job: Job) -> Iterator[Fault]:
    if job.mode is Mode.SYNC and job.max_staleness != 0:
        yield Fault(
            field="max_staleness",
            found=str(job.max_staleness),
            kind=FaultKind.CONFLICT,
            rule="sync mode trains on fresh rollouts only (0)",
            remedy="set max_staleness: 0, or mode: async",
            reads=("mode",),
        )
    if job.mode is Mode.ASYNC and job.max_staleness < 1:
        yield Fault(
            field="max_staleness",
            found=str(job.max_staleness),
            kind=FaultKind.CONFLICT,
            rule="async mode needs at least 1",
            remedy="set max_staleness: 1 or more, or mode: sync",
            reads=("mode",),
        )


def _model_faults(job: Job) -> Iterator[Fault]:
    if job.algorithm is Algorithm.PPO and job.models.critic is None:
        yield Fault(
            field="models.critic",
            found="missing",
            kind=FaultKind.MISSING,
            rule="ppo needs a critic",
            remedy="add models.critic: {shape: ...}, or use algorithm: grpo",
        )
    if job.algorithm is Algorithm.GRPO and job.models.critic is not None:
        yield Fault(
            field="models.critic",
            found="given",
            kind=FaultKind.CONFLICT,
            rule="grpo has no critic",
            remedy="remove models.critic, or use algorithm: ppo",
        )
    for role, model in job._models().items():
        if isinstance(model, ModelSpec):
            yield from _shape_faults(role, model)


def _shape_faults(role: str, model: ModelSpec) -> Iterator[Fault]:
    place = f"models.{role}.shape"
    if isinstance(model.shape, str) and model.shape not in BUILT_IN_SHAPES:
        yield Fault(
            field=place,
            found=repr(model.shape),
            kind=FaultKind.UNKNOWN_NAME,
            rule=f"a built-in shape is one of {', '.join(sorted(BUILT_IN_SHAPES))}",
            remedy="use one of these names or write the numbers of the shape",
        )
    elif isinstance(model.shape, LlmShape) and model.shape.heads % model.shape.kv_heads:
        yield Fault(
            field=f"{place}.kv_heads",
            found=str(model.shape.kv_heads),
            kind=FaultKind.CONFLICT,
            rule=f"kv_heads divides heads ({model.shape.heads})",
            remedy="correct one of the two",
        )


def _length_faults(job: Job) -> Iterator[Fault]:
    lengths = job.lengths
    for name, mean, longest in (
        ("prompt_mean", lengths.prompt_mean, lengths.prompt),
        ("response_mean", lengths.response_mean, lengths.response),
    ):
        if mean is not None and mean > longest:
            yield Fault(
                field=f"lengths.{name}",
                found=str(mean),
                kind=FaultKind.CONFLICT,
                rule=f"a mean is at most the maximum ({longest})",
                remedy="correct one of the two",
            )
    if lengths.response_std is not None and lengths.response_mean is None:
        yield Fault(
            field="lengths.response_std",
            found=str(lengths.response_std),
            kind=FaultKind.CONFLICT,
            rule="a standard deviation needs response_mean",
            remedy="add lengths.response_mean",
            reads=("lengths.response_mean",),
        )
