"""Sections `grpo` and `ppo` of a job: the numerics of policy optimisation. Refuses unknown fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stages.rl.correction_spec import CorrectionSpec
from stages.rl.variants.registry import VARIANTS
from stages.spec.execution import OptimizerSpec


class KlSpec(BaseModel):
    """Penalty that keeps the policy near the reference policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    estimator: Literal["k1", "k2", "k3", "k3_straight_through"] = "k3"
    """Per-token estimator (Schulman 2020): k1 = log ratio, k2 = half its square, k3 = exp(-x) - 1 + x.
    `k3_straight_through`: the value of k3 with the gradient of k2, the unbiased one on policy. Left out, a penalty in
    the reward takes k1, whose sum over a response is unbiased."""

    weight: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Factor of the penalty (with `target`: of the first iteration); 0 = no penalty, and reference log-probs aren't
    needed."""

    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the loss; `reward`: taken from the reward of each token (PPO, REINFORCE++)."""

    target: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Mean KL per response, nats, that the weight is steered to after each iteration (Ziegler et al. 2019, section
    2.2); null = the weight is fixed."""

    horizon_samples: int = Field(default=10_000, ge=1)
    """Responses over which a steady error of 20 % changes the weight by 20 %; used with `target`."""

    @property
    def loss_weight(self) -> float:
        """Factor of the penalty in the loss; 0 where it is part of the reward."""
        return self.weight if self.place == "loss" else 0.0

    @model_validator(mode="before")
    @classmethod
    def _take_unbiased_estimator(cls, data: Any) -> Any:  # noqa: ANN401 - input of any type, as pydantic hands it over
        if isinstance(data, dict) and data.get("place") == "reward":
            return {"estimator": "k1", **data}
        return data

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.place == "reward" and self.estimator == "k3_straight_through":
            raise ValueError("estimator k3_straight_through is a gradient, and a reward has none; use k1, k2 or k3")
        if self.target is not None and self.weight == 0.0:
            raise ValueError(
                f"target is {self.target}, but weight is 0 and stays 0 however it is multiplied; give a first weight"
            )
        return self


class AdvantageSpec(BaseModel):
    """How the rewards of a prompt group become advantages."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    estimator: Literal["group", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "group"
    """`group`: reward minus group mean; `rloo`: reward minus the mean of the others (leave one out); `reinforce_pp`:
    return of each token, normalised over all tokens of the iteration; `reinforce_pp_baseline`: the same after the group
    mean was taken off."""

    normalisation: Literal["std", "none", "batch_std"] = "std"
    """Divisor: the group's sample standard deviation, nothing (Dr. GRPO), or the std of the whole batch."""

    eps: float = Field(default=1e-4, gt=0.0, allow_inf_nan=False)
    """Added to the standard deviation before dividing, reward units."""

    std_floor: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Least standard deviation used as divisor, reward units; bounds the advantages of nearly constant groups."""

    @property
    def is_per_token(self) -> bool:
        """Whether the tokens of a response have advantages of their own."""
        return self.estimator.startswith("reinforce_pp")

    @model_validator(mode="after")
    def _is_divided_once(self) -> Self:
        if self.is_per_token and self.normalisation != "none":
            raise ValueError(
                f"normalisation is {self.normalisation}, but estimator {self.estimator} normalises over all tokens of "
                "the iteration; use none"
            )
        return self


class DynamicSamplingSpec(BaseModel):
    """Replacement of prompt groups without signal (DAPO, section 3.2)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_rounds: int = Field(default=3, ge=1, le=20)
    """Sampling rounds after the first one, at most; each samples as many new prompts as groups are still without
    signal. What is missing then stays missing: the iteration trains on fewer groups, and the record says how many."""


class PolicyOptions(BaseModel):
    """Options of every clipped policy loss."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    clip_low: float = Field(default=0.2, ge=0.0, lt=1.0)
    """Lower clip width: the ratio is clipped below at 1 - clip_low. GSPO 3e-4, the others 0.2."""

    clip_high: float = Field(default=0.2, ge=0.0, allow_inf_nan=False)
    """Upper clip width: the ratio is clipped above at 1 + clip_high. DAPO 0.28, GSPO 4e-4, the others 0.2."""

    dual_clip: float | None = Field(default=None, gt=1.0, allow_inf_nan=False)
    """Bound c of the dual clip (Ye et al. 2020): with a negative advantage the loss is at most c * |advantage|.
    Null = off."""

    kl: KlSpec = Field(default_factory=KlSpec)
    """Penalty towards the reference policy."""

    loss_aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"] = "token_mean"
    """How token losses become one number."""

    entropy_weight: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Factor of the entropy bonus; 0 = none."""

    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Length of the zone before the response limit over which DAPO's soft penalty falls from 0 to -factor; 0 = off."""

    overlong_factor: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Largest soft overlong penalty, reward units."""

    num_mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch over the rollouts of an iteration."""

    num_epochs: int = Field(default=1, ge=1)
    """Passes over the rollouts of an iteration."""


class GrpoSpec(PolicyOptions):
    """Options of GRPO and its variants.

    `loss` names the variant; a field that the author leaves out takes that variant's published value, so that a
    built spec always holds the numbers in force.
    """

    loss: str = "grpo"
    """Variant by name; one file each in stages/rl/variants."""

    advantage: AdvantageSpec = Field(default_factory=AdvantageSpec)
    """How advantages are made. Dr. GRPO and RLOO don't divide by the standard deviation, RLOO leaves one out."""

    loss_aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"] = (
        "sequence_mean_token_mean"
    )
    """How token losses become one number. GRPO and GSPO `sequence_mean_token_mean`, Dr. GRPO
    `sequence_mean_token_sum_norm`, the others `token_mean`."""

    drop_zero_variance_groups: bool = True
    """Leave groups whose valid rewards are all equal out of the loss (no policy gradient there); always counted. False
    by default where the baseline isn't the group's (REINFORCE++)."""

    dynamic_sampling: DynamicSamplingSpec | None = None
    """Sample further prompts in place of groups without signal; null = off."""

    @property
    def ratio(self) -> Literal["token", "sequence"]:
        """Level of the importance ratio."""
        return VARIANTS[self.loss].ratio

    @model_validator(mode="before")
    @classmethod
    def _take_variant_values(cls, data: Any) -> Any:  # noqa: ANN401 - input of any type, as pydantic hands it over
        if not isinstance(data, dict):
            return data
        name = data.get("loss", "grpo")
        if not isinstance(name, str) or name not in VARIANTS:
            raise ValueError(f"loss {name!r} is unknown; it is one of {', '.join(VARIANTS)}")
        return _filled(data, VARIANTS[name].defaults)

    @model_validator(mode="after")
    def _reward_penalty_needs_tokens(self) -> Self:
        if self.kl.place == "reward" and self.kl.weight > 0.0 and not self.advantage.is_per_token:
            raise ValueError(
                f"kl.place is reward, but advantage.estimator {self.advantage.estimator} has one advantage per "
                "response; use kl.place: loss, or loss: reinforce_pp"
            )
        return self


class PpoSpec(PolicyOptions):
    """Section `ppo` of a job: everything of PPO, in place of the section `grpo`."""

    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount gamma per token, in (0, 1]."""

    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """Lambda of generalised advantage estimation, in [0, 1]."""

    whiten_advantages: bool = True
    """Give the advantages of an iteration mean 0 and standard deviation 1 over the unmasked tokens."""

    value_clip: float | None = Field(default=0.2, gt=0.0, allow_inf_nan=False)
    """Half width of the interval around the old value to which the new one is clipped; null = off."""

    value_weight: float = Field(default=0.5, gt=0.0, allow_inf_nan=False)
    """Factor of the value loss; the critic has an optimiser of its own, so it only acts where gradients are clipped."""

    critic_optimizer: OptimizerSpec = OptimizerSpec(learning_rate=1e-5)
    """AdamW of the critic."""

    critic_warm_up_iterations: int = Field(default=0, ge=0)
    """Iterations at the start of the run in which the critic is trained and the policy stays as it is."""

    @model_validator(mode="before")
    @classmethod
    def _take_published_values(cls, data: Any) -> Any:  # noqa: ANN401 - input of any type, as pydantic hands it over
        return _filled(data, {"kl": {"place": "reward"}}) if isinstance(data, dict) else data

    def policy(self) -> GrpoSpec:
        """Return the options of the policy's loss as the trainer reads them; a penalty in the reward is none there."""
        shared = {name: getattr(self, name) for name in PolicyOptions.model_fields}
        kl = self.kl if self.kl.place == "loss" else KlSpec()
        return GrpoSpec.model_validate({**shared, "kl": kl, "loss": "ppo"})


def _filled(data: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return an author's fields with published values where they left some out, also inside sub-sections."""
    filled = {**defaults, **data}
    for name, value in defaults.items():
        if isinstance(value, Mapping) and isinstance(data.get(name), dict):
            filled[name] = {**value, **data[name]}
    return filled


def sampling_faults(correction: CorrectionSpec, *, top_p: float, top_k: int, min_p: float = 0.0) -> list[str]:
    """Sentences on sampling settings that make importance ratios wrong; empty when there are none.

    A truncating sampler renormalises by the kept mass, so with unchanged weights every ratio equals that mass instead
    of 1 (trl#6789).

    Args:
        correction: The correction in force.
        top_p: Nucleus mass; 1 = off.
        top_k: Candidates kept; 0 or -1 = off.
        min_p: Least probability relative to the best token; 0 = off.
    """
    if not correction.uses_ratios:
        return []
    on = [
        text
        for text, is_on in (
            (f"top_p {top_p}", top_p < 1.0),
            (f"top_k {top_k}", top_k > 0),
            (f"min_p {min_p}", min_p > 0),
        )
        if is_on
    ]
    if not on:
        return []
    return [
        f"sampling {', '.join(on)} truncates the distribution, so correction {correction.name!r} would weigh every "
        "token by the kept mass: switch truncation off, or write correction.name: none"
    ]
