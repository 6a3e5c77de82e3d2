"""Section `rewards` of a job: which verifiers score a completion and how their values combine.

Refuses unknown fields; the options of a reward are checked by that reward.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

REWARD_MODEL_KEY: Final = "reward_model"
"""Key of the reward model's score in the stored parts."""


class RewardSpec(BaseModel):
    """One reward of the weighted sum."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str = Field(min_length=1)
    """Registered reward: `exact_answer`, `math_verify`, `format`, `reasoning_gym`, `python_callable`."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of this reward's value in the sum; negative = a penalty, 0 is refused."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that reward, checked by its own option model."""

    label: str | None = Field(default=None, min_length=1)
    """Key of its value in the stored parts; null = `name`. Must be unique in the list."""

    @model_validator(mode="after")
    def _weight_counts(self) -> Self:
        if self.weight == 0.0:
            raise ValueError(f"rewards[{self.name}].weight is 0: a reward without influence; remove it from the list")
        return self

    @property
    def key(self) -> str:
        """Key of this reward's value in the stored parts."""
        return self.label or self.name


class RewardModelSpec(BaseModel):
    """How the score of the job's reward model (`models.reward`) enters the reward."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of the score in the weighted sum; 0 is refused."""

    clip: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Largest magnitude of the score before weighting; null = unbounded. The stored part is the score itself."""

    @model_validator(mode="after")
    def _weight_counts(self) -> Self:
        if self.weight == 0.0:
            raise ValueError("reward_model.weight is 0: a reward without influence; remove the section")
        return self


class RewardsSpec(BaseModel):
    """The rewards of a run and the limits of the processes that compute them."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    terms: tuple[RewardSpec, ...] = ()
    """The weighted rules; at least one where no reward model scores."""

    reward_model: RewardModelSpec | None = None
    """The reward model beside (or instead of) the rules; null = rules only."""

    deadline_s: float = Field(default=10.0, gt=0.0, le=3600.0)
    """Seconds a verifier may take for one completion before it is killed and the row gets status `timed_out`."""

    num_verifier_processes: int = Field(default=1, ge=1, le=1024)
    """Child processes that verify at the same time."""

    score_truncated: bool = Field(default=False)
    """True: completions cut at the length limit are scored as is; false: status `truncated`, no value."""

    unparsable_value: float | None = Field(default=None, allow_inf_nan=False)
    """Value of a term whose answer can't be found in a completion that ended by itself. Null: status `unparsable`, no
    value, so the row leaves the baseline. A number (usually 0): "no answer" counts as an answer of that value and the
    status is `ok` with nothing parsed. Crashes, time-outs and cut completions never get it."""

    max_attempts: int = Field(default=2, ge=1, le=10)
    """Tries per completion whose verifier timed out or died, before the status stands."""

    @model_validator(mode="after")
    def _something_rewards(self) -> Self:
        if not self.terms and self.reward_model is None:
            raise ValueError("terms is empty and there is no reward_model, so nothing is rewarded; give one of them")
        return self

    @model_validator(mode="after")
    def _labels_unique(self) -> Self:
        keys = [term.key for term in self.terms] + ([REWARD_MODEL_KEY] if self.reward_model is not None else [])
        repeated = sorted(key for key, n in Counter(keys).items() if n > 1)
        if repeated:
            raise ValueError(f"rewards.terms use the keys {repeated} more than once; give each a `label` of its own")
        return self
