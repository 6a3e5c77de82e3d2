"""Sections `grpo` and `ppo` of a job: the numerics of policy optimisation. Refuses unknown fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stages.rl.correction_spec import CorrectionSpec


class KlSpec(BaseModel):
    """Penalty that keeps the policy near the reference policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    estimator: Literal["k1", "k2", "k3", "k3_straight_through"] = "k3"
    """Per-token estimator (Schulman 2020): k1 = log ratio, k2 = half its square, k3 = exp(-x) - 1 + x.
    `k3_straight_through`: the value of k3 with the gradient of k2, the unbiased one on policy."""

    weight: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Factor of the penalty in the loss; 0 = no penalty, and reference log-probs aren't needed."""


class AdvantageSpec(BaseModel):
    """How the rewards of a prompt group become advantages."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    estimator: Literal["group", "rloo"] = "group"
    """`group`: reward minus group mean; `rloo`: reward minus the mean of the others (leave one out)."""

    normalisation: Literal["std", "none", "batch_std"] = "std"
    """Divisor: the group's sample standard deviation, nothing (Dr. GRPO), or the std of the whole batch."""

    eps: float = Field(default=1e-4, gt=0.0, allow_inf_nan=False)
    """Added to the standard deviation before dividing, reward units."""

    std_floor: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Least standard deviation used as divisor, reward units; bounds the advantages of nearly constant groups."""


_VARIANTS: dict[str, dict[str, Any]] = {
    # DeepSeekMath (Shao et al. 2024): group mean and std, mean over a response's tokens, then over responses.
    "grpo": {"loss_aggregation": "sequence_mean_token_mean"},
    # Liu et al. 2025 (Understanding R1-Zero-like training): no std, sum of tokens over a constant.
    "dr_grpo": {"advantage": {"normalisation": "none"}, "loss_aggregation": "sequence_mean_token_sum_norm"},
    # Yu et al. 2025 (DAPO): clip-higher, every token counts the same.
    "dapo": {"clip_high": 0.28, "loss_aggregation": "token_mean"},
    # Zheng et al. 2025 (GSPO), section 5.1: sequence-level ratio with its far narrower clip range.
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "sequence_mean_token_mean"},
    # Ahmadian et al. 2024 (RLOO): leave-one-out baseline, no normalisation.
    "rloo": {"advantage": {"estimator": "rloo", "normalisation": "none"}, "loss_aggregation": "token_mean"},
}


class GrpoSpec(BaseModel):
    """Options of GRPO and its variants.

    `loss` names the variant; a field that the author leaves out takes that variant's published value, so that a
    built spec always holds the numbers in force.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo"] = "grpo"
    """Variant; see stages/rl/losses."""

    clip_low: float = Field(default=0.2, ge=0.0, lt=1.0)
    """Lower clip width: the ratio is clipped below at 1 - clip_low. GSPO 3e-4, the others 0.2."""

    clip_high: float = Field(default=0.2, ge=0.0, allow_inf_nan=False)
    """Upper clip width: the ratio is clipped above at 1 + clip_high. DAPO 0.28, GSPO 4e-4, the others 0.2."""

    dual_clip: float | None = Field(default=None, gt=1.0, allow_inf_nan=False)
    """Bound c of the dual clip (Ye et al. 2020): with a negative advantage the loss is at most c * |advantage|.
    Null = off."""

    kl: KlSpec = Field(default_factory=KlSpec)
    """Penalty towards the reference policy."""

    advantage: AdvantageSpec = Field(default_factory=AdvantageSpec)
    """How advantages are made. Dr. GRPO and RLOO don't divide by the standard deviation, RLOO leaves one out."""

    loss_aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"] = (
        "sequence_mean_token_mean"
    )
    """How token losses become one number. DAPO and RLOO `token_mean`, Dr. GRPO `sequence_mean_token_sum_norm`."""

    entropy_weight: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Factor of the entropy bonus; 0 = none."""

    drop_zero_variance_groups: bool = True
    """Leave groups whose valid rewards are all equal out of the loss (no policy gradient there); always counted."""

    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Length of the zone before the response limit over which DAPO's soft penalty falls from 0 to -factor; 0 = off."""

    overlong_factor: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Largest soft overlong penalty, reward units."""

    num_mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch over the rollouts of an iteration."""

    num_epochs: int = Field(default=1, ge=1)
    """Passes over the rollouts of an iteration."""

    @model_validator(mode="before")
    @classmethod
    def _take_variant_values(cls, data: Any) -> Any:  # noqa: ANN401 - input of any type, as pydantic hands it over
        if not isinstance(data, dict):
            return data
        variant = _VARIANTS.get(str(data.get("loss", "grpo")), {})
        return {**variant, **data}


class PpoSpec(BaseModel):
    """Options that PPO adds: the critic's targets and its loss."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount gamma per token, in (0, 1]."""

    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """Lambda of generalised advantage estimation, in [0, 1]."""

    value_clip: float | None = Field(default=0.2, gt=0.0, allow_inf_nan=False)
    """Half width of the interval around the old value to which the new one is clipped; null = off."""

    value_weight: float = Field(default=0.5, gt=0.0, allow_inf_nan=False)
    """Factor of the value loss."""

    whiten_advantages: bool = True
    """Give the advantages of an iteration mean 0 and standard deviation 1 over the unmasked tokens."""


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
