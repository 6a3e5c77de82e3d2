"""Each reward on its own: right, wrong, unparsable, and what it says about gold answers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from stages.data.arithmetic_source import arithmetic_rows
from stages.data.rows import PromptRow
from stages.data.spec import DataSpec
from stages.errors import RewardError, SpecFaultsError
from stages.rewards.protocol import RewardResult, ScoringItem, Verdict
from stages.rewards.registry import REWARDS, make_verifier, reward_faults
from stages.rewards.spec import RewardSpec, RewardsSpec
from storage.rollout_schema import FinishReason, RewardStatus


def row(answer: str | None, **metadata: object) -> PromptRow:
    return PromptRow(prompt_id="e/1", environment="e", prompt="p", answer=answer, metadata=metadata)


def verdict(name: str, text: str, answer: str | None, **options: object) -> Verdict:
    verifier = make_verifier(RewardSpec(name=name, options=options))
    return verifier.verify(ScoringItem(row=row(answer), text=text, finish_reason=FinishReason.STOP))


def test_exact_answer_compares_text_without_surrounding_blanks() -> None:
    assert verdict("exact_answer", " 042\n", "042") == Verdict(value=1.0, parsed="042")
    assert verdict("exact_answer", "42", "042") == Verdict(value=0.0, parsed="42")


def test_exact_answer_takes_the_last_match_of_its_pattern() -> None:
    options = {"pattern": r"#### (\S+)", "gold_pattern": r"#### (\S+)"}
    assert verdict("exact_answer", "#### 1 no, #### 7", "so\n#### 7", **options) == Verdict(value=1.0, parsed="7")


def test_exact_answer_without_a_match_is_unparsable_not_zero() -> None:
    assert verdict("exact_answer", "seven", "7", pattern=r"#### (\S+)") == Verdict(value=None)


def test_exact_answer_can_ignore_case() -> None:
    assert verdict("exact_answer", "Paris", "paris", ignore_case=True).value == 1.0
    assert verdict("exact_answer", "Paris", "paris").value == 0.0


def test_exact_answer_names_gold_answers_it_cannot_use() -> None:
    verifier = make_verifier(RewardSpec(name="exact_answer", options={"gold_pattern": r"#### (\S+)"}))
    assert verifier.gold_fault(row(None)) == "no gold answer"
    assert "doesn't match the answer 'seven'" in verifier.gold_fault(row("seven"))
    assert verifier.gold_fault(row("#### 7")) is None
    assert make_verifier(RewardSpec(name="exact_answer")).gold_fault(row("  ")) == "the gold answer is empty"


def test_exact_answer_solves_the_built_in_arithmetic() -> None:
    problem = next(arithmetic_rows(DataSpec(source="arithmetic:addition", size=1), "addition"))
    assert verdict("exact_answer", problem.answer, problem.answer).value == 1.0


@pytest.mark.parametrize(
    ("gold", "completion", "value"),
    [
        # R4: equal and unequal pairs, right answers by arithmetic.
        ("1/2", "The answer is $\\frac{1}{2}$", 1.0),
        ("\\frac{1}{2}", "so \\boxed{0.5}", 1.0),
        ("0.5", "\\boxed{\\frac{2}{4}}", 1.0),
        ("288", "There are 288", 1.0),
        ("288", "There are 289", 0.0),
        ("1,000", "\\boxed{1000}", 1.0),
        ("$x^2 + 2x + 1$", "\\boxed{(x+1)^2}", 1.0),
        ("$x^2 + 2x + 1$", "\\boxed{(x+2)^2}", 0.0),
        ("$\\sqrt{8}$", "\\boxed{2\\sqrt{2}}", 1.0),
        ("-3", "\\boxed{3}", 0.0),
        ("$\\{1, 2\\}$", "\\boxed{\\{2, 1\\}}", 1.0),
    ],
)
@pytest.mark.engines
def test_r4_math_verify_tells_equal_from_unequal(gold: str, completion: str, value: float) -> None:
    pytest.importorskip("math_verify")
    assert verdict("math_verify", completion, gold).value == value


@pytest.mark.engines
def test_math_verify_without_an_expression_is_unparsable() -> None:
    pytest.importorskip("math_verify")
    assert verdict("math_verify", "I do not know", "7") == Verdict(value=None)


@pytest.mark.engines
def test_r6_math_verify_names_gold_answers_without_an_expression() -> None:
    pytest.importorskip("math_verify")
    verifier = make_verifier(RewardSpec(name="math_verify"))
    assert verifier.gold_fault(row("")) == "math-verify finds no expression in the gold answer ''"
    assert verifier.gold_fault(row("72")) is None


def test_format_with_tags_wants_each_pair_once_and_nothing_outside() -> None:
    tags = ["think", "answer"]
    assert verdict("format", "<think>a\nb</think>\n<answer>7</answer>", None, tags=tags).value == 1.0
    assert verdict("format", "<answer>7</answer><think>a</think>", None, tags=tags).value == 0.0
    assert verdict("format", "<think>a</think><answer>7</answer> bye", None, tags=tags).value == 0.0
    assert verdict("format", "<think>a</think><answer>7</answer><answer>8</answer>", None, tags=tags).value == 0.0


def test_format_with_pattern_wants_the_whole_completion_to_match() -> None:
    assert verdict("format", "042", None, pattern=r"\d{3}").value == 1.0
    assert verdict("format", "0421", None, pattern=r"\d{3}").value == 0.0


@pytest.mark.engines
def test_reasoning_gym_scores_with_the_tasks_own_function() -> None:
    pytest.importorskip("reasoning_gym")
    from stages.data.dataset import load_dataset

    data = load_dataset(DataSpec(source="reasoning-gym:basic_arithmetic", size=5, seed=1, held_out_fraction=0.0))
    first = data.train.rows[0]
    verifier = make_verifier(RewardSpec(name="reasoning_gym", options={"pattern": "<answer>(.*?)</answer>"}))

    def scored(text: str) -> Verdict:
        return verifier.verify(ScoringItem(row=first, text=text, finish_reason=FinishReason.STOP))

    assert scored(f"<answer>{first.answer}</answer>") == Verdict(value=1.0, parsed=first.answer)
    # The task gives part of the score to an answer that contains the right one.
    assert scored(f"<answer>{first.answer}!!</answer>").value == len(first.answer) / (len(first.answer) + 2)
    assert scored("no tags") == Verdict(value=None)
    assert "no reasoning-gym task" in verifier.gold_fault(row("7"))


def test_python_callable_gets_completion_answer_row_and_options() -> None:
    options = {"target": "sample_verifiers:length_of_answer", "kwargs": {"scale": 0.5}}
    assert verdict("python_callable", "abcd", "x", **options) == Verdict(value=2.0)
    assert verdict("python_callable", "abcd", None, **options) == Verdict(value=None)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module_here:f", "can't be loaded: No module named"),
        ("sample_verifiers:no_such", "can't be loaded: module 'sample_verifiers' has no attribute"),
        ("sample_verifiers:os", "is a module, not a function"),
    ],
)
def test_python_callable_that_cannot_be_loaded_is_refused(target: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make_verifier(RewardSpec(name="python_callable", options={"target": target}))


def test_all_reward_faults_are_reported_together() -> None:
    spec = RewardsSpec.model_validate(
        {
            "terms": [
                {"name": "exact"},
                {"name": "exact_answer", "options": {"pattern": "(", "bogus": 1}},
                {"name": "python_callable", "options": {"target": "m:f"}},
                {"name": "format"},
            ]
        }
    )
    faults = reward_faults(spec, allow_python_callables=False)
    assert len(faults) == 5
    assert faults[0] == f"rewards.terms.0.name is 'exact'; known rewards: {', '.join(REWARDS)}"
    assert "rewards.terms.1.options.pattern" in faults[1]
    assert "no regular expression" in faults[1]
    assert "rewards.terms.1.options.bogus" in faults[2]
    assert "this deployment doesn't allow it" in faults[3]
    assert "exactly one of `pattern` and `tags`" in faults[4]


def test_unknown_reward_name_is_a_spec_fault() -> None:
    with pytest.raises(SpecFaultsError, match="'exact'; known rewards"):
        make_verifier(RewardSpec(name="exact"))


def test_reward_terms_of_one_key_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"keys \['format'\] more than once"):
        RewardsSpec.model_validate({"terms": [{"name": "format"}, {"name": "format"}]})


def test_reward_of_weight_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match="without influence"):
        RewardSpec(name="format", weight=0.0)


@pytest.mark.parametrize(("value", "status"), [(0.0, RewardStatus.CRASHED), (None, RewardStatus.OK)])
def test_r11_a_result_has_a_value_exactly_when_it_is_ok(value: float | None, status: RewardStatus) -> None:
    with pytest.raises(ValueError, match="only `ok` has a value"):
        RewardResult(value=value, status=status)
