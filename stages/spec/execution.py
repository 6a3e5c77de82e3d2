"""Sampling, optimiser, evaluation, engines and limits of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field, JsonValue, field_validator

from stages.spec.section import Section

if TYPE_CHECKING:
    from plans.spec.cluster import Machine

Dtype = Literal["fp32", "bf16"]


class SamplingSpec(Section):
    """How completions are sampled during training."""

    temperature: float = Field(default=1.0, gt=0, le=10)
    """Softmax temperature; log-probs are those of the tempered distribution."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass. With importance correction only 1.0 is allowed: truncation changes the sampling distribution."""
    top_k: int = Field(default=0, ge=0)
    """Number of candidates kept; 0 keeps all."""


class OptimizerSpec(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    warm_up_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; `linear` and `cosine` reach 0 at the last optimizer step of the run."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Adam's decay rates."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay on matrices (norms and biases have none)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are scaled down."""

    @field_validator("betas", mode="before")
    @classmethod
    def _take_lists(cls, value: Any) -> Any:  # noqa: ANN401 - input of any type, as pydantic hands it over
        # Strict validation takes no list for a tuple, once a section around this one was read as a mapping.
        return tuple(value) if isinstance(value, list) else value


class EvaluationSpec(Section):
    """Evaluation on held-out prompts; its rollouts are stored like training ones."""

    every: int = Field(default=5, ge=0)
    """Evaluate after every n-th iteration (and always after the last); 0 evaluates only before and after the run."""
    prompts: int = Field(default=200, ge=1)
    """Held-out prompts, the same ones each time."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Completions per prompt."""
    temperature: float = Field(default=1.0, ge=0, le=10)
    """0 decodes greedily."""


class StorageSpec(Section):
    """Where the run's data goes when the cluster file names no store for the region."""

    root: str | None = None
    """fsspec URL; absent means the deployment's own store directory."""
    keep_policies: int = Field(default=3, ge=2)
    """Newest policy versions kept (more where a reader or the staleness bound needs them)."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest resume points kept."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep every n-th policy version for good, with its resume point, to rewind to; 0 keeps none."""
    keep_rollouts: int = Field(default=0, ge=0)
    """Newest committed iterations whose rollouts are kept; 0 keeps those of all. Where `keep_rollouts_days` is given
    too, an iteration stays as long as either of them keeps it."""
    keep_rollouts_days: float = Field(default=0.0, ge=0)
    """Days for which rollouts are kept after their iteration ended; 0 sets no time."""
    anchor_every: int = Field(default=16, ge=1)
    """Every n-th policy version is stored whole in every region; between them the regions get exact deltas, where there
    are several regions or the store is remote. 1 = always whole."""
    samples_per_shard: int = Field(default=128, ge=1)
    """Completions of one rollout shard (rounded down to whole prompt groups, at least one); the unit of a retry."""


class GenerationEngineSpec(Section):
    """The engine that samples."""

    name: Literal["transformers", "vllm"] = "transformers"
    """Engine by name."""
    dtype: Dtype = "fp32"
    """Compute type. Only fp32 makes sampled tokens independent of batch composition."""
    dtype_on: dict[str, Dtype] = {}
    """Compute type on some machines, by the machine's name or its GPU type (the name counts first), e.g. fp32 where a
    GPU has no bf16. It holds for generation and for forward passes of reference and reward models there."""
    options: dict[str, JsonValue] = {}
    """Engine options by the engine's own names, e.g. `enforce_eager`."""

    def dtype_at(self, machine: Machine) -> Dtype:
        """Return the compute type on a machine."""
        return self.dtype_on.get(machine.name, self.dtype_on.get(machine.gpu, self.dtype))


LORA_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers that adapters may stand on, in the order of a decoder layer."""


class LoraSpec(Section):
    """Low-rank adapters: the policy's own weights stay as they are, and versions after the first are adapters only."""

    rank: int = Field(default=16, ge=1, le=512)
    """Rank r of every adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """An adapter's output is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0)
    """Only 0: importance ratios compare log-probs of two passes, which must be of one function."""
    target_modules: tuple[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...] = (
        LORA_TARGETS
    )
    """Linear layers of every decoder layer that get an adapter."""

    @property
    def scaling(self) -> float:
        """Factor of an adapter's output, alpha / r."""
        return self.alpha / self.rank

    @field_validator("dropout")
    @classmethod
    def _refuse_dropout(cls, value: float) -> float:
        if value > 0:
            message = (
                f"{value} would make the log-probs of two passes differ, so importance ratios would compare two "
                "functions; write 0 or remove it"
            )
            raise ValueError(message)
        return value

    @field_validator("target_modules", mode="before")
    @classmethod
    def _take_lists(cls, value: Any) -> Any:  # noqa: ANN401 - input of any type, as pydantic hands it over
        return tuple(value) if isinstance(value, list) else value

    @field_validator("target_modules")
    @classmethod
    def _order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Take each name once, in the order of a layer: what is the same set is the same job."""
        if not value:
            message = f"empty, so nothing would be trained; name some of {', '.join(LORA_TARGETS)}"
            raise ValueError(message)
        return tuple(name for name in LORA_TARGETS if name in value)


class TrainingEngineSpec(Section):
    """The engine that trains."""

    name: Literal["accelerate", "megatron"] = "accelerate"
    """Engine by name; `megatron` splits the policy by tensors and layers (a critic is trained by accelerate)."""
    options: dict[str, JsonValue] = {}
    """Engine options by the engine's own names."""
    lora: LoraSpec | None = None
    """Train adapters on the policy's layers instead of its weights; null trains all weights. A critic is trained
    whole either way."""

    @property
    def sharding(self) -> Literal["none", "full"]:
        """What the ranks of policy and critic share out beside the rows; megatron's critic has no options."""
        return "full" if self.name == "accelerate" and self.options.get("sharding") == "full" else "none"


class EnginesSpec(Section):
    """Which engines run and how long they live."""

    generation: GenerationEngineSpec = GenerationEngineSpec()
    """Sampling engine."""
    training: TrainingEngineSpec = TrainingEngineSpec()
    """Training engine; its precision is `training.precision` of the job."""
    idle_timeout_s: float = Field(default=900.0, gt=0)
    """An engine without requests for this long ends itself."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for an engine to come up."""


class LimitsSpec(Section):
    """Deadlines, tolerances and alarm thresholds."""

    stage_deadline_s: float = Field(default=3600.0, gt=0)
    """A stage process that runs longer is ended and retried."""
    gate_deadline_s: float = Field(default=7 * 24 * 3600.0, gt=0)
    """Longest wait for the policy version that an iteration needs."""
    gang_wait_s: float = Field(default=600.0, gt=0)
    """Longest wait of a training stage for those of the other machines, where a plan trains on several."""
    gang_lost_s: float = Field(default=60.0, ge=1)
    """Seconds without a sign of life after which such a stage counts as dead."""
    stall_check_s: float | None = Field(default=None, gt=0)
    """Seconds after which Airflow looks whether an iteration moves (a deadline alert); null has it not look. A run
    counts as stalled when no iteration was reported for this long (null: 600 s) and for ten times the usual seconds of
    one."""
    canary_max_logprob_gap: float | None = Field(default=None, gt=0)
    """Largest allowed gap, in nats, between engine and trainer log-probs on the canary rows (mean over tokens). Null is
    0.01 where weights and engines are fp32, 0.1 where any is bf16 (correct engines then differ by 0.01 to 0.04)."""
    non_finite_steps: int = Field(default=3, ge=1)
    """Non-finite optimizer steps in a row after which the iteration fails."""
    alarm_iterations: int = Field(default=3, ge=1)
    """Iterations in a row with the same trouble (all truncated, constant reward, no signal) that raise an alarm."""
    max_over_length_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of dataset prompts longer than `lengths.prompt` that may be dropped (their count is recorded); above it the
    job is refused."""


class ReplanSpec(Section):
    """When the placement is decided again."""

    every: int = Field(default=0, ge=0)
    """Re-plan at every n-th iteration; 0 only at the first one and when the cluster changes."""
    drift: float = Field(default=0.5, gt=0)
    """Relative gap between the measured and the promised ratio of generation to training time that makes a re-plan due,
    in asynchronous runs; 0.5 = half as much again in either direction."""
    confirm: int = Field(default=3, ge=1)
    """Iterations in a row that must drift so far; after a call the drift must fall below half before it calls again."""
    min_gain: float = Field(default=0.1, ge=0)
    """Relative gain that a new plan must promise to be taken."""
    switch_s: float = Field(default=30.0, ge=0)
    """Seconds that are lost when devices change their role: engines start anew and load weights. A plan that does so
    must win them back in the iterations that are left; dealing the shards anew to the same replicas costs nothing."""


class ProfileSpec(Section):
    """When the machines are measured."""

    every: int = Field(default=0, ge=0)
    """Measure at every n-th iteration; 0 only at the first one and when the cluster changes."""
