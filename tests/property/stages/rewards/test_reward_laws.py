"""Laws of rewards."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.data.rows import PromptRow
from stages.rewards.protocol import RewardResult, ScoringItem
from stages.rewards.scorer import Scorer, unscored
from stages.rewards.spec import RewardsSpec
from storage.rollout_schema import FinishReason, RewardStatus

answers = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda text: text.strip())
EXACT = RewardsSpec.model_validate({"terms": [{"name": "exact_answer"}]})
WEIGHTED = RewardsSpec.model_validate(
    {
        "terms": [
            {"name": "exact_answer", "weight": 2.0},
            {"name": "format", "weight": -0.5, "options": {"pattern": "a*"}},
        ]
    }
)


def item(text: str, answer: str, finish: FinishReason = FinishReason.STOP) -> ScoringItem:
    row = PromptRow(prompt_id="e/1", environment="e", prompt="p", answer=answer)
    return ScoringItem(row=row, text=text, finish_reason=finish)


@settings(deadline=None)
@given(answers)
def test_gold_answer_always_scores_one_and_has_no_gold_fault(answer: str) -> None:
    scorer = Scorer(EXACT)
    assert scorer.score(item(answer, answer)).value == 1.0
    assert scorer.gold_faults(item(answer, answer).row) == []


@settings(deadline=None)
@given(answers, answers)
def test_value_is_the_weighted_sum_of_the_parts(text: str, answer: str) -> None:
    result = Scorer(WEIGHTED).score(item(text, answer))
    assert result.value == 2.0 * result.parts["exact_answer"] - 0.5 * result.parts["format"]


@settings(deadline=None)
@given(answers, answers, st.sampled_from(FinishReason), st.booleans())
def test_only_complete_completions_reach_a_verifier_unless_asked_for(
    text: str, answer: str, finish: FinishReason, score_truncated: bool
) -> None:
    spec = EXACT.model_copy(update={"score_truncated": score_truncated})
    early = unscored(item(text, answer, finish), spec)
    reaches = finish is FinishReason.STOP or (finish is FinishReason.LENGTH and score_truncated)
    assert early == (None if reaches else RewardResult(value=None, status=RewardStatus.TRUNCATED))


@settings(deadline=None)
@given(answers, answers)
def test_items_and_results_survive_json(text: str, answer: str) -> None:
    original = item(text, answer, FinishReason.LENGTH)
    assert ScoringItem.from_json(original.to_json()) == original
    result = Scorer(WEIGHTED).score(original)
    assert RewardResult.from_json(result.to_json()) == result
