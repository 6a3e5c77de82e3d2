"""What the committed rows of an iteration say: rewards, lengths, staleness, discarded shares, mismatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from storage.rollout_schema import FinishReason

ALL_TRUNCATED: Final = "all_truncated"
CONSTANT_REWARD: Final = "constant_reward"
NO_SIGNAL: Final = "no_signal"
NO_REWARD: Final = "no_reward"
ALL_STALE: Final = "all_stale"
"""Troubles: what is wrong when it lasts."""

TRUNCATED_SHARE: Final = 0.95
"""Share of cut completions from which they count as all truncated."""

TROUBLE_WORDS: Final[Mapping[str, str]] = {
    ALL_TRUNCATED: "nearly every completion is cut at the length limit; raise lengths.response",
    CONSTANT_REWARD: "all rewards are equal; look at the verifier's verdicts with `motley rollouts show`",
    NO_SIGNAL: "no prompt group has different rewards, so nothing is learned; the task is too easy or too hard",
    ALL_STALE: "every prompt group was over max_staleness when its turn came, so nothing was trained on; raise "
    "max_staleness, or lower asynchrony.generate_ahead",
    NO_REWARD: "no completion has a reward; look at the reward status and errors with `motley rollouts show`",
}
"""Trouble in words, with the remedy."""


def rollout_metrics(
    rows: Sequence[Mapping[str, Any]], consumed: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, float | None], dict[str, int]]:
    """Return metrics and counts of the rows of an iteration.

    Args:
        rows: Sampled rows with the columns `completion_token_ids`, `finish_reason`, `reward`, `reward_status`.
        consumed: Rows that training decided on, with the columns `is_dropped`, `dropped_reason`, `staleness`,
            `logprob_gap_max`, `importance_weight_mean`, `importance_weight_max`. The same rows, unless some wait in the
            buffer.
    """
    rewards = np.array([row["reward"] for row in rows if row["reward"] is not None], dtype=np.float64)
    lengths = np.array([len(row["completion_token_ids"]) for row in rows], dtype=np.float64)
    reasons = Counter(str(row["dropped_reason"]) for row in consumed if row["is_dropped"])
    statuses = Counter(str(row["reward_status"]) for row in rows)
    truncated = sum(row["finish_reason"] == FinishReason.LENGTH for row in rows)
    count = len(rows)
    metrics: dict[str, float | None] = {
        "reward_mean": _stat(rewards, np.mean),
        "reward_std": _stat(rewards, np.std),
        "reward_min": _stat(rewards, np.min),
        "reward_max": _stat(rewards, np.max),
        "response_tokens_mean": _stat(lengths, np.mean),
        "response_tokens_p50": _stat(lengths, np.median),
        "response_tokens_p95": float(np.quantile(lengths, 0.95)) if count else None,
        "response_tokens_max": _stat(lengths, np.max),
        "truncated_fraction": truncated / count if count else None,
        "dropped_fraction": sum(reasons.values()) / len(consumed) if consumed else None,
        **{f"dropped_fraction_{name}": amount / len(consumed) for name, amount in sorted(reasons.items())},
        **_column_stats(consumed),
    }
    counts = {
        "rows": count,
        "tokens": int(lengths.sum()),
        "truncated": truncated,
        **{f"reward_status_{name}": amount for name, amount in sorted(statuses.items())},
        **{f"dropped_{name}": amount for name, amount in sorted(reasons.items())},
        **{f"staleness_{age}": amount for age, amount in sorted(_ages(consumed).items())},
    }
    return metrics, counts


def troubles_of(
    rows: Sequence[Mapping[str, Any]], num_groups: int, num_zero_variance: int, num_in_batch: int
) -> list[str]:
    """Return the names of what is wrong with an iteration's rows.

    Args:
        rows: As for `rollout_metrics`.
        num_groups: Prompt groups with a reward.
        num_zero_variance: Groups among them whose rewards are all equal.
        num_in_batch: Groups that were trained on, or would have been but for their rewards; the others were too old.
    """
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    truncated = sum(row["finish_reason"] == FinishReason.LENGTH for row in rows)
    found = []
    if not num_in_batch:
        found.append(ALL_STALE)
    if rows and truncated >= TRUNCATED_SHARE * len(rows):
        found.append(ALL_TRUNCATED)
    if not rewards:
        found.append(NO_REWARD)
    elif len(rewards) > 1 and min(rewards) == max(rewards):
        found.append(CONSTANT_REWARD)
    if num_groups and num_groups == num_zero_variance:
        found.append(NO_SIGNAL)
    return found


def lasting_troubles(history: Sequence[Sequence[str]], num_iterations: int) -> dict[str, str]:
    """Return a sentence for every trouble that lasts, by its name.

    Args:
        history: Troubles of consecutive iterations, the present one last.
        num_iterations: Iterations in a row after which a trouble raises an alarm.
    """
    if len(history) < num_iterations:
        return {}
    recent = history[len(history) - num_iterations :]
    lasting = [name for name in recent[-1] if all(name in troubles for troubles in recent)]
    return {name: f"{name} in {num_iterations} iterations in a row: {TROUBLE_WORDS[name]}" for name in lasting}


def _column_stats(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return data age, and sampler-trainer mismatch, where training has measured them."""
    gaps = _values(rows, "logprob_gap_max")
    weights, largest = _values(rows, "importance_weight_mean"), _values(rows, "importance_weight_max")
    ages = _values(rows, "staleness")
    return {
        "logprob_gap_max": _stat(gaps, np.max),
        "importance_weight_mean": _stat(weights, np.mean),
        "importance_weight_max": _stat(largest, np.max),
        "staleness_mean": _stat(ages, np.mean),
        "staleness_max": _stat(ages, np.max),
    }


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([row[name] for row in rows if row.get(name) is not None], dtype=np.float64)


def _ages(rows: Sequence[Mapping[str, Any]]) -> Counter[int]:
    return Counter(int(row["staleness"]) for row in rows if row.get("staleness") is not None)


def _stat(values: np.ndarray[Any, np.dtype[np.float64]], function: Any) -> float | None:  # noqa: ANN401 - numpy reduction
    return float(function(values)) if values.size else None
