"""The committed data that an iteration is trained on; the same for the policy's and the critic's trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stages.context import StageContext
from stages.spec.job import TrainingJob
from stages.staleness.consumption import Consumption
from storage.documents import fingerprint
from storage.errors import ObjectMissingError
from storage.rollout_schema import Family

_COLUMNS: Final[Mapping[Family, Sequence[str]]] = {
    Family.ROLLOUTS: (
        "row_id", "group_id", "prompt_id", "prompt_index", "sample_index", "prompt_token_ids", "completion_token_ids",
        "sampler_logprobs", "finish_reason", "policy_version_first", "policy_version_last", "temperature",
    ),
    Family.REWARD: ("row_id", "reward", "reward_status"),
    Family.REFERENCE: ("row_id", "reference_logprobs"),
    Family.VALUES: ("row_id", "values"),
}  # fmt: skip

_ESSENTIAL: Final[Mapping[Family, tuple[str, str]]] = {
    Family.REWARD: ("reward_status", "the stage that scores rewards"),
    Family.REFERENCE: ("reference_logprobs", "the stage that scores under the reference policy"),
    Family.VALUES: ("values", "stage critic_inference"),
}
"""Column that every row must have, and what makes it."""


def families_of(job: TrainingJob) -> list[Family]:
    """Return the column families that training reads."""
    return [
        Family.ROLLOUTS,
        Family.REWARD,
        *([Family.REFERENCE] if job.needs_reference else []),
        *([Family.VALUES] if job.ppo is not None else []),
    ]


def data_fingerprint(context: StageContext, consumption: Consumption) -> str:
    """Return the SHA-256 of what both trainers of an iteration read; they belong together where it is the same."""
    # The number of rollout shards changes neither rows nor order, but the digests are per shard.
    return fingerprint("training_data", context.job.fingerprint, context.iteration, consumption.digests())


def joined_rows(consumption: Consumption) -> list[dict[str, Any]]:
    """Return the rows of the groups that are decided on, with the columns of the other families.

    Raises:
        ObjectMissingError: a rollout has no reward, or no reference log-probs or values where they are needed.
    """
    rows = consumption.rows(_COLUMNS)
    present = {family for families in consumption.families.values() for family in families}
    for family, (column, stage) in _ESSENTIAL.items():
        incomplete = [row["row_id"] for row in rows if column not in row] if family in present else []
        if incomplete:
            raise ObjectMissingError(
                f"{len(incomplete)} rollouts have no {family.value} row, first {incomplete[0]}; repeat {stage}."
            )
    return rows
