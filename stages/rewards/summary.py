"""What a batch of reward results says as a whole: shares per status, and the patterns that mean trouble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.errors import RewardError
from stages.rewards.protocol import RewardResult
from storage.rollout_schema import RewardStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSummary:
    """Counts and alarms of a batch."""

    num_results: int
    """Completions."""

    num_by_status: Mapping[str, int]
    """Completions per status, every status present."""

    mean: float | None
    """Mean value of the scored completions; None when there are none."""

    is_constant: bool
    """All scored completions (two or more) have the same value: nothing to learn, or a verifier that always fails."""

    @property
    def truncated_fraction(self) -> float:
        """Share of completions that were cut, in [0, 1]."""
        return self.num_by_status[RewardStatus.TRUNCATED] / max(self.num_results, 1)


def summarise_rewards(results: Sequence[RewardResult]) -> RewardSummary:
    """Counts and alarms of a batch."""
    counts = Counter(result.status for result in results)
    values = [result.value for result in results if result.value is not None]
    return RewardSummary(
        num_results=len(results),
        num_by_status={status.value: counts[status] for status in RewardStatus},
        mean=sum(values) / len(values) if values else None,
        is_constant=len(values) > 1 and min(values) == max(values),
    )


def check_verifiers_work(results: Sequence[RewardResult]) -> None:
    """Stop when the verifiers failed on every completion that was handed to them.

    Raises:
        RewardError: Not one completion was judged, and at least one verifier timed out or crashed.
    """
    failed = [result for result in results if result.status in (RewardStatus.TIMED_OUT, RewardStatus.CRASHED)]
    judged = [result for result in results if result.status in (RewardStatus.OK, RewardStatus.UNPARSABLE)]
    if failed and not judged:
        summary = summarise_rewards(results)
        raise RewardError(
            f"rewards: the verifiers failed on all {len(failed)} completions they were given "
            f"({dict(summary.num_by_status)}); first error: {failed[0].error}. Nothing can be learned from this batch",
            num_by_status=dict(summary.num_by_status),
        )
