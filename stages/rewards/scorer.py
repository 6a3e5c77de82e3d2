"""The weighted sum of a job's rewards for one completion; runs inside a verifier process."""

from __future__ import annotations

from stages.data.rows import PromptRow
from stages.rewards.protocol import RewardResult, ScoringItem, Verdict
from stages.rewards.registry import make_verifier
from stages.rewards.spec import RewardsSpec
from storage.rollout_schema import FinishReason, RewardStatus


class Scorer:
    """All verifiers of a job."""

    def __init__(self, spec: RewardsSpec) -> None:
        """Make every verifier; this imports their packages.

        Raises:
            SpecFaultsError: Options of a term are wrong.
            RewardError: A term can't be set up.
        """
        self._spec = spec
        self._terms = [(term, make_verifier(term)) for term in spec.terms]

    def score(self, item: ScoringItem) -> RewardResult:
        """Value, or why there is none. An exception of a verifier becomes the status `crashed`."""
        parts: dict[str, float] = {}
        parsed: str | None = None
        total = 0.0
        unparsable = False
        for term, verifier in self._terms:
            try:
                verdict = verifier.verify(item)
            except Exception as error:  # noqa: BLE001 - a verifier may raise anything; it is recorded, never scored
                error_text = f"{term.key}: {type(error).__name__}: {error}"
                return RewardResult(value=None, status=RewardStatus.CRASHED, parts=parts, error=error_text)
            parsed = parsed if parsed is not None else verdict.parsed
            value = self._value(verdict)
            if value is None:
                unparsable = True
            else:
                parts[term.key] = value
                total += term.weight * value
        if unparsable:
            return RewardResult(value=None, status=RewardStatus.UNPARSABLE, parts=parts, parsed=parsed)
        return RewardResult(value=total, status=RewardStatus.OK, parts=parts, parsed=parsed)

    def gold_faults(self, row: PromptRow) -> list[str]:
        """Why this row can't be judged, or is judged wrongly: one sentence per term concerned."""
        faults: list[str] = []
        for term, verifier in self._terms:
            fault = verifier.gold_fault(row)
            good = None if fault is not None else verifier.known_good(row)
            if good is not None:
                item = ScoringItem(row=row, text=good, finish_reason=FinishReason.STOP)
                value = verifier.verify(item).value
                # Scores above 1 don't occur; one a rounding below does, in tasks that compute their score.
                if value is None or value < 1.0 - 1e-6:
                    fault = f"the known-good completion {good!r} scores {value} instead of 1"
            if fault is not None:
                faults.append(f"{term.key}: {fault}")
        return faults

    def _value(self, verdict: Verdict) -> float | None:
        return self._spec.unparsable_value if verdict.value is None else verdict.value


def unscored(item: ScoringItem, spec: RewardsSpec) -> RewardResult | None:
    """The result of a completion that isn't handed to a verifier at all; None = it has to be scored.

    A cut completion has no answer yet; one that the engine gave up is cut too. The finish reason decides.
    """
    if item.finish_reason is FinishReason.ABORT:
        return RewardResult(value=None, status=RewardStatus.TRUNCATED)
    if item.finish_reason is FinishReason.LENGTH and not spec.score_truncated:
        return RewardResult(value=None, status=RewardStatus.TRUNCATED)
    return None
