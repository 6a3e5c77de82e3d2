"""What every engine understands: token ids and numbers in, token ids and numbers out.

Five roles exist. A *generation* engine samples completions, a *scoring* engine gives log-probs of given tokens (the
reference policy; the canary), a *training* engine turns rollouts into optimizer steps, a *critic* engine gives values
and learns them, a *reward* engine scores whole completions. An engine knows nothing of storage, runs or Airflow:
weights come from and go to local directories in Hugging Face format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec
from stages.spec.execution import OptimizerSpec

FinishReason = Literal["stop", "length", "interrupted"]
"""`stop`: an end token was sampled (it is the last token id). `length`: the token limit came first. `interrupted`: new
weights wait to be loaded; ask again with the tokens so far, and the rest is sampled under those."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What an engine says of itself; stored beside everything that it makes."""

    name: str
    """Registry name, e.g. `transformers`."""
    version: str
    """Version of the library behind it."""
    dtype: str
    """Compute type, `fp32` or `bf16`."""
    device: str
    """Device type, e.g. `cpu` or `cuda`."""
    logprob_mode: str
    """`processed`: log-probs of the distribution that was sampled from (after temperature and truncation)."""
    is_batch_invariant: bool
    """Whether sampled tokens are the same for every batch composition."""
    policy_version: int | None
    """Version of the weights that it holds; None before the first load."""
    weights_hash: str | None
    """Hash of the weights that it was told to load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One completion to sample."""

    prompt_token_ids: Sequence[int]
    """Prompt, complete with its start token."""
    seed: int
    """Seed of this sample alone, from its identity; the tokens depend on nothing else of the batch."""
    max_tokens: int
    """Longest completion, in tokens, the end token and `sampled_token_ids` included."""
    temperature: float
    """0 decodes greedily."""
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: Sequence[int] = ()
    """Every id that ends a completion."""
    sampled_token_ids: Sequence[int] = ()
    """First tokens of the completion, sampled by an interrupted call; sampling goes on behind them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion."""

    token_ids: Sequence[int]
    """Ids sampled by this call, the end token included when `finish_reason` is `stop`; may be none when interrupted."""
    logprobs: Sequence[float]
    """Log-prob of each sampled id under the distribution it was sampled from. [len(token_ids)]"""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that sampled these ids: what the engine holds, not what somebody asked for. Weights never
    change during a call."""
    weights_hash: str
    """Hash that those weights were loaded with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTokens:
    """A prompt with given completion tokens, to be scored."""

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    temperature: float = 1.0
    """Divides the logits before the softmax."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRow:
    """One completion as the trainer sees it."""

    row_id: str
    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    advantage: float
    """Advantage of every token of the completion; with `token_advantages` their mean, for people."""
    sampler_logprobs: Sequence[float]
    """Log-probs as sampled. [len(completion_token_ids)]"""
    temperature: float
    reference_logprobs: Sequence[float] | None = None
    """Log-probs of the reference policy; needed when the KL weight is not 0. [len(completion_token_ids)]"""
    token_advantages: Sequence[float] | None = None
    """Advantage of each token (PPO, REINFORCE++); None = `advantage` for all. [len(completion_token_ids)]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """All optimizer steps of one iteration."""

    rows: Sequence[TrainingRow]
    """Rows of complete prompt groups, already in training order."""
    mini_batches: Sequence[Sequence[int]]
    """Indices into `rows` of each optimizer step, in order (epochs unrolled)."""
    grpo: GrpoSpec
    correction: CorrectionSpec
    optimizer: OptimizerSpec
    total_optimizer_steps: int
    """Optimizer steps of the whole run, for the schedule."""
    micro_batch_tokens: int
    """Padded tokens per micro-batch at most (one row is always allowed)."""
    max_non_finite_steps: int
    """Non-finite optimizer steps in a row that end the call with a `NumericsError`."""
    max_response_tokens: int | None = None
    """Response limit of the job; needed by the loss aggregation `sequence_mean_token_sum_norm`, which divides by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStepMetrics:
    """Measurements of one optimizer step."""

    optimizer_step: int
    """Count over the whole run, from 0."""
    is_skipped: bool
    """True when loss or gradient was not finite and the weights were left alone."""
    num_rows: int
    num_tokens: int
    values: dict[str, float]
    """Loss, gradient norm, learning rate, KL, entropy, clip fractions, importance weights, effective sample size ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOutcome:
    """What the optimizer steps of one iteration did."""

    steps: Sequence[OptimizerStepMetrics]
    trainer_logprobs: Sequence[Sequence[float]]
    """Log-probs of each row under the weights at the start of the call. [rows][completion tokens]"""
    skipped_row_ids: Sequence[str] = field(default_factory=tuple)
    """Rows of the skipped optimizer steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticRow:
    """One completion as the critic's trainer sees it."""

    row_id: str
    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    old_values: Sequence[float]
    """Values under the critic before the iteration. [len(completion_token_ids)]"""
    returns: Sequence[float]
    """Targets. [len(completion_token_ids)]"""

    @property
    def temperature(self) -> float:
        """1: a value has no temperature."""
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticTrainingRequest:
    """All optimizer steps of the critic in one iteration."""

    rows: Sequence[CriticRow]
    """Rows of complete prompt groups, already in training order."""
    mini_batches: Sequence[Sequence[int]]
    """Indices into `rows` of each optimizer step, in order (epochs unrolled)."""
    value_clip: float | None
    """Half width of the interval around the old value; None = no clipping."""
    value_weight: float
    """Factor of the loss."""
    optimizer: OptimizerSpec
    total_optimizer_steps: int
    """Optimizer steps of the whole run, for the schedule."""
    micro_batch_tokens: int
    """Padded tokens per micro-batch at most (one row is always allowed)."""
    max_non_finite_steps: int
    """Non-finite optimizer steps in a row that end the call with a `NumericsError`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticOutcome:
    """What the critic's optimizer steps of one iteration did."""

    steps: Sequence[OptimizerStepMetrics]
    skipped_row_ids: Sequence[str] = field(default_factory=tuple)
    """Rows of the skipped optimizer steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBase:
    """The whole weights that an adapter belongs to."""

    directory: Path
    """Model directory in Hugging Face format."""
    weights_hash: str
    """Hash of its weights; an engine that holds them keeps them."""


class Engine(Protocol):
    """What all roles share."""

    def info(self) -> EngineInfo:
        """Describe the engine and the weights it holds."""
        ...

    def close(self) -> None:
        """Free everything; the engine can't be used afterwards."""
        ...


class ScoringEngine(Engine, Protocol):
    """Gives log-probs of given tokens."""

    def load_weights(
        self, directory: Path, policy_version: int, weights_hash: str, base: AdapterBase | None = None
    ) -> None:
        """Replace the weights in place; no cache survives. A failure half-way leaves the engine unusable.

        With a base, `directory` holds an adapter on it, as the launch's `lora` describes; without, whole weights.
        """
        ...

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Return the log-prob of each completion token, as [rows][completion tokens]."""
        ...


class GenerationEngine(ScoringEngine, Protocol):
    """Samples completions, and scores (for the canary)."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample one completion per request, in the order of the requests.

        An engine that has an attribute `is_interrupted` is given a function there; once that returns true, the engine
        ends the call soon, and completions that it could not finish say `interrupted`.
        """
        ...


class TrainingEngine(ScoringEngine, Protocol):
    """Makes optimizer steps."""

    def load_checkpoint(
        self,
        policy_dir: Path,
        trainer_dir: Path | None,
        policy_version: int,
        weights_hash: str,
        base: AdapterBase | None = None,
    ) -> None:
        """Take weights from `policy_dir`, and optimizer, RNG and step count from `trainer_dir`.

        Without `trainer_dir` the optimizer is fresh. With a base, `policy_dir` holds an adapter on it.
        """
        ...

    def train(self, request: TrainingRequest) -> TrainingOutcome:
        """Make the optimizer steps; the held policy version is unknown until `save` names it."""
        ...

    def save(self, policy_dir: Path, trainer_dir: Path, policy_version: int) -> None:
        """Write serving weights and a complete resume point, then hold `policy_version`.

        `policy_dir` is in the format that generation engines load; both directories must not exist yet. Where the
        launch has `lora`, version 0 is written whole, with adapters that do nothing yet, and later ones as adapters.
        """
        ...


class CriticEngine(Engine, Protocol):
    """A value model: gives values and learns them."""

    def load_checkpoint(
        self, policy_dir: Path, trainer_dir: Path | None, policy_version: int, weights_hash: str
    ) -> None:
        """Take the critic's weights from `policy_dir`; see `TrainingEngine.load_checkpoint`."""
        ...

    def values(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Return the value before each completion token, as [rows][completion tokens]."""
        ...

    def train_critic(self, request: CriticTrainingRequest) -> CriticOutcome:
        """Make the optimizer steps; the held version is unknown until `save` names it."""
        ...

    def save(self, policy_dir: Path, trainer_dir: Path, policy_version: int) -> None:
        """Write the critic's weights and a complete resume point, then hold `policy_version`."""
        ...


class RewardEngine(Engine, Protocol):
    """A sequence classifier with one output."""

    def load_weights(self, directory: Path, policy_version: int, weights_hash: str) -> None:
        """Replace the weights in place; a failure leaves the engine unusable."""
        ...

    def rewards(self, rows: Sequence[ScoredTokens]) -> list[float]:
        """Return the score of each prompt with its completion, read at the completion's last token, as [rows]."""
        ...
