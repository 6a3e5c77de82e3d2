"""The job's reward model at work: scores of sampled tokens, added to what the rules gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from stages.context import StageContext
from stages.engines.client import RemoteEngine
from stages.engines.protocol import ScoredTokens
from stages.errors import ContractError, WeightMismatchError
from stages.policy_files import policy_at_home
from stages.rewards.protocol import RewardResult
from stages.rewards.spec import REWARD_MODEL_KEY, RewardModelSpec
from storage.rollout_schema import RewardStatus
from storage.weights_hash import weights_hash

TOKEN_COLUMNS: Final = ("prompt_token_ids", "completion_token_ids")
"""Columns of the rollouts that a reward model reads."""

WEIGHTS_KEY: Final = "reward_model_weights_hash"
"""Where the manifest of policy version 0 says which reward model the run has."""


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A reward model, ready to score."""

    engine: RemoteEngine
    """Engine that holds it."""
    weights_hash: str
    """Hash of its tensors."""
    spec: RewardModelSpec
    """How its score enters the reward."""

    def added(self, results: Sequence[RewardResult], rows: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
        """Add weight x score to every result that has a value; a row without one (cut, failed) isn't scored.

        Args:
            results: Of the rules, [N].
            rows: With `TOKEN_COLUMNS`, [N].
        """
        valued = [place for place, result in enumerate(results) if result.status is RewardStatus.OK]
        scores = self.engine.rewards(
            [
                ScoredTokens(
                    prompt_token_ids=rows[place]["prompt_token_ids"],
                    completion_token_ids=rows[place]["completion_token_ids"],
                )
                for place in valued
            ]
        )
        summed = list(results)
        for place, score in zip(valued, scores, strict=True):
            result = results[place]
            bounded = score if self.spec.clip is None else min(max(score, -self.spec.clip), self.spec.clip)
            summed[place] = replace(
                result,
                value=(result.value or 0.0) + self.spec.weight * bounded,
                parts={**result.parts, REWARD_MODEL_KEY: score},
            )
        return summed


def open_reward_model(context: StageContext, replica: int) -> RewardModel:
    """Return a replica of the reward model on this machine, proved to be the one that the run began with.

    Raises:
        ContractError: the job has none.
        WeightMismatchError: the directory on this machine holds other weights.
    """
    spec = context.job.rewards.reward_model
    if spec is None:
        raise ContractError("the job has no rewards.reward_model, so its reward model can't score.")
    wanted = policy_at_home(context, 0).manifest.metadata.get(WEIGHTS_KEY)
    directory, found = reward_model_files(context)
    if found != wanted:
        raise WeightMismatchError(
            f"models.reward.path {directory} on {context.machine.name} holds weights {found[:12]}, but the run began "
            f"with {str(wanted)[:12]}; put the same model on every machine that scores.",
            path=str(directory),
        )
    with context.phase("engines"):
        return RewardModel(context.engines.reward_model(replica, directory, found), found, spec)


def reward_model_files(context: StageContext) -> tuple[Path, str]:
    """Return the directory of the reward model and the hash of its weights."""
    model = context.job.reward_model
    if model is None or model.path is None:
        raise ContractError("the job has no models.reward.path.")
    directory = Path(model.path).expanduser()
    with context.phase("hash"):
        return directory, weights_hash({path.name: path for path in sorted(directory.glob("*.safetensors"))})
