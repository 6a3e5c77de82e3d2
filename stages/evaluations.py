"""Scores of committed evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stages.context import StageContext
from storage.errors import ObjectMissingError
from storage.layout import Split
from storage.rollout_schema import Family, RewardStatus
from storage.rollouts import read_family

_FAILED: Final = frozenset({RewardStatus.TIMED_OUT.value, RewardStatus.CRASHED.value})


def evaluation_score(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the reward rows of an evaluation say.

    `score` counts a completion without an answer (unparsable, cut) as 0: it is not a right answer. Rows whose verifier
    failed (timed out, crashed) have no score; they are left out of the mean and counted.

    Args:
        rows: Rows with `reward` and `reward_status`.
    """
    statuses = Counter(str(row["reward_status"]) for row in rows)
    num_judged = len(rows) - sum(statuses[name] for name in _FAILED)
    total = sum(row["reward"] for row in rows if row["reward"] is not None)
    return {
        "score": total / num_judged if num_judged else None,
        "reward_status": dict(sorted(statuses.items())),
        "num_judged": num_judged,
    }


def stored_evaluation(context: StageContext, version: int) -> dict[str, Any] | None:
    """Return the score of the committed evaluation of a policy version, None if there is none."""
    try:
        table = read_family(
            context.store, context.run.name, version, Family.REWARD, columns=("reward", "reward_status"),
            split=Split.EVAL,
        )  # fmt: skip
    except ObjectMissingError:
        return None
    return evaluation_score(table.to_pylist())
