"""Section `correction` of a job: what is done about rollouts that another policy sampled than the one being trained.

Three policies take part. *Behaviour*: the sampler, one version per token. *Proximal*: the trainer's own log-probs under
the weights at the start of the iteration. *Current*: the weights after some optimizer steps of the iteration. The clip
of the loss bounds current / proximal; the correction weighs by proximal / behaviour.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

CorrectionName = Literal[
    "truncated_token", "truncated_sequence", "masked_token", "masked_sequence", "decoupled_ppo", "behaviour_ppo", "none"
]

_PRESETS: Final[dict[str, dict[str, Any]]] = {
    # Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training": min(ratio, cap).
    "truncated_token": {"level": "token", "mode": "truncate", "cap": 2.0},
    "truncated_sequence": {"level": "sequence", "mode": "truncate", "cap": 2.0},
    # Both bounds are ours: a factor of two in either direction.
    "masked_token": {"level": "token", "mode": "mask", "cap": 2.0, "floor": 0.5},
    "masked_sequence": {"level": "sequence", "mode": "mask", "cap": 2.0, "floor": 0.5},
    # Fu et al. 2025 (AReaL), decoupled PPO: far weights are rejected, and rejected tokens stay in the denominator.
    "decoupled_ppo": {"level": "token", "mode": "mask", "cap": 5.0, "denominator": "all"},
    # Schulman et al. 2017: one ratio, current / behaviour, and its clip.
    "behaviour_ppo": {"mode": "none", "clip_around": "behaviour"},
    "none": {"mode": "none"},
}


class RejectionSpec(BaseModel):
    """Responses that are left out, whole, since they are too far from the policy being trained."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate of KL(behaviour || proximal), Schulman 2020, from the log-ratio x = log(proximal / behaviour)
    of tokens that the behaviour policy sampled: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x."""
    aggregate: Literal["mean", "max"] = "mean"
    """Over the tokens of a response. There is no sum: it grows with the length (trl#4772)."""
    limit: float = Field(gt=0.0, allow_inf_nan=False)
    """Largest estimate at which a response still counts, nats."""


class CorrectionSpec(BaseModel):
    """Importance correction between the sampler that wrote a rollout and the trainer that learns from it.

    `name` chooses a published or usual form; a field that the author leaves out takes that form's value, so that a
    built spec always holds the numbers in force.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: CorrectionName = "truncated_token"
    """Form of the correction."""

    level: Literal["token", "sequence"] = "token"
    """`token`: one weight per token; `sequence`: the exponential of the mean log-ratio of the response, one per row."""

    mode: Literal["truncate", "mask", "none"] = "truncate"
    """`truncate`: weight = min(ratio, cap); `mask`: weight = ratio inside [floor, cap], else 0; `none`: weight 1."""

    cap: float = Field(default=2.0, ge=1.0, allow_inf_nan=False)
    """Largest weight (truncate) or largest ratio that still counts (mask)."""

    floor: float = Field(default=0.0, ge=0.0, le=1.0)
    """Least ratio that still counts, in [0, 1]; used by mode mask only."""

    clip_around: Literal["proximal", "behaviour"] = "proximal"
    """Policy that the clipped ratio of the loss is taken to."""

    reject: RejectionSpec | None = None
    """Responses left out on top of the weights; null = none."""

    denominator: Literal["kept", "all"] = "kept"
    """Whether masked and rejected tokens count where the loss is divided: `kept` leaves them out, and out of penalties
    too; `all` gives them weight 0 and counts them."""

    @property
    def uses_ratios(self) -> bool:
        """Whether the ratio of trainer to sampler has any influence on the loss."""
        return self.mode != "none" or self.reject is not None or self.clip_around == "behaviour"

    @property
    def changes_counts(self) -> bool:
        """Whether what the loss is divided by is known only with the ratios."""
        return self.denominator == "kept" and (self.mode == "mask" or self.reject is not None)

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, data: Any) -> Any:  # noqa: ANN401 - input of any type, as pydantic hands it over
        if not isinstance(data, dict):
            return data
        preset = _PRESETS.get(str(data.get("name", "truncated_token")), {})
        # A bound that only one mode has must not come in with another mode that the author asks for.
        if data.get("mode", preset.get("mode")) != "mask":
            preset = {name: value for name, value in preset.items() if name != "floor"}
        return {**preset, **data}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.floor > 0.0 and self.mode != "mask":
            raise ValueError(
                f"correction.floor is {self.floor} but mode {self.mode!r} has no lower bound; use mode: mask"
            )
        if self.clip_around == "behaviour" and self.mode != "none":
            raise ValueError(
                f"correction.clip_around is behaviour with mode {self.mode!r}, which would count the ratio of proximal "
                "to behaviour policy twice; use mode: none, or clip_around: proximal"
            )
        return self
