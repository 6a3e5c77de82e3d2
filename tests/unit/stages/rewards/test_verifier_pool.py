"""The verifier pool: failures have a status and no value, dead children are replaced, threads don't matter."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.data.gold_fault import GoldFault
from stages.data.rows import PromptRow
from stages.errors import RewardError, SpecFaultsError
from stages.rewards.pool import VerifierPool
from stages.rewards.protocol import RewardResult, ScoringItem
from stages.rewards.spec import RewardsSpec
from stages.rewards.summary import check_verifiers_work, summarise_rewards
from storage.rollout_schema import FinishReason, RewardStatus


def item(text: str, finish: FinishReason = FinishReason.STOP, answer: str = "right") -> ScoringItem:
    row = PromptRow(prompt_id="e/1", environment="e", prompt="p", answer=answer)
    return ScoringItem(row=row, text=text, finish_reason=finish)


def callable_spec(**fields: object) -> RewardsSpec:
    term = {"name": "python_callable", "label": "judge", "options": {"target": "sample_verifiers:judge_by_text"}}
    term["options"] |= fields.pop("options", {})
    return RewardsSpec.model_validate({"terms": [term], "deadline_s": 1.0, "max_attempts": 1} | fields)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(callable_spec(), allow_python_callables=True) as started:
        yield started


def score_one(pool: VerifierPool, text: str) -> RewardResult:
    return pool.score([item(text)])[0]


RIGHT = RewardResult(value=1.0, status=RewardStatus.OK, parts={"judge": 1.0})


def test_right_and_wrong_answers_are_ok_with_one_and_zero(pool: VerifierPool) -> None:
    assert pool.score([item("right"), item("wrong")]) == [
        RIGHT,
        RewardResult(value=0.0, status=RewardStatus.OK, parts={"judge": 0.0}),
    ]


@pytest.mark.parametrize("text", ["hang", "sleep"])
def test_r1_a_verifier_that_hangs_is_timed_out_without_a_value_and_replaced(pool: VerifierPool, text: str) -> None:
    result = score_one(pool, text)
    assert (result.value, result.status, result.error) == (None, RewardStatus.TIMED_OUT, "no reply within 1.0 s")
    assert score_one(pool, "right") == RIGHT


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("exit", "verifier process ended with exit code 3"),
        ("killed", "verifier process killed by SIGKILL"),
        ("raise", "judge: RuntimeError: broken verifier"),
        ("nan", "judge: ValueError: a verifier returned nan; a value is a finite number, or None for no answer"),
        (
            "text",
            "judge: TypeError: sample_verifiers:judge_by_text returned str; return a number, a bool or None",
        ),
    ],
)
def test_r3_r11_a_verifier_that_fails_is_crashed_without_a_value(pool: VerifierPool, text: str, error: str) -> None:
    result = score_one(pool, text)
    assert result == RewardResult(value=None, status=RewardStatus.CRASHED, error=error)
    assert score_one(pool, "right") == RIGHT


def test_unparsable_completion_has_no_value(pool: VerifierPool) -> None:
    assert score_one(pool, "nothing") == RewardResult(value=None, status=RewardStatus.UNPARSABLE)


def test_what_a_verifier_prints_is_not_taken_for_its_reply(pool: VerifierPool) -> None:
    assert score_one(pool, "print").value == 0.0


def test_r1_r2_scoring_works_off_the_main_thread(pool: VerifierPool) -> None:
    results: list[RewardResult] = []
    thread = threading.Thread(target=lambda: results.extend(pool.score([item("right"), item("hang"), item("right")])))
    thread.start()
    thread.join(60)
    assert [result.status for result in results] == [RewardStatus.OK, RewardStatus.TIMED_OUT, RewardStatus.OK]


def test_m10_cut_completion_has_status_truncated_and_is_not_scored(pool: VerifierPool) -> None:
    truncated = RewardResult(value=None, status=RewardStatus.TRUNCATED)
    assert pool.score([item("right", FinishReason.LENGTH), item("right", FinishReason.ABORT)]) == [truncated, truncated]


def test_m5_finish_reason_decides_whatever_the_text_ends_with(pool: VerifierPool) -> None:
    assert pool.score([item("right</s>", FinishReason.LENGTH)])[0].status is RewardStatus.TRUNCATED
    assert pool.score([item("right", FinishReason.STOP)])[0].status is RewardStatus.OK


def test_cut_completion_is_scored_as_is_when_the_job_asks_for_it() -> None:
    with VerifierPool(callable_spec(score_truncated=True), allow_python_callables=True) as pool:
        results = pool.score([item("right", FinishReason.LENGTH), item("right", FinishReason.ABORT)])
    assert results == [RIGHT, RewardResult(value=None, status=RewardStatus.TRUNCATED)]


def test_unparsable_value_counts_as_an_answer_when_the_job_gives_one() -> None:
    with VerifierPool(callable_spec(unparsable_value=-0.5), allow_python_callables=True) as pool:
        results = pool.score([item("nothing"), item("raise")])
    assert results[0] == RewardResult(value=-0.5, status=RewardStatus.OK, parts={"judge": -0.5})
    assert (results[1].value, results[1].status) == (None, RewardStatus.CRASHED)


def test_r12_a_verifier_that_dies_once_is_tried_again(tmp_path: Path) -> None:
    spec = callable_spec(max_attempts=2, options={"kwargs": {"flag": str(tmp_path / "died")}})
    with VerifierPool(spec, allow_python_callables=True) as pool:
        assert pool.score([item("once", answer="once")]) == [RIGHT]


def test_weighted_terms_add_up_and_a_missing_part_leaves_no_value() -> None:
    spec = RewardsSpec.model_validate(
        {
            "terms": [
                {"name": "exact_answer", "options": {"pattern": "<answer>(.*?)</answer>"}},
                {"name": "format", "weight": 0.25, "options": {"tags": ["think", "answer"]}},
            ]
        }
    )
    with VerifierPool(spec, allow_python_callables=False) as pool:
        results = pool.score(
            [item("<think>t</think><answer>right</answer>"), item("<answer>right</answer>"), item("right")]
        )
    ok = RewardStatus.OK
    assert results == [
        RewardResult(value=1.25, status=ok, parts={"exact_answer": 1.0, "format": 1.0}, parsed="right"),
        RewardResult(value=1.0, status=ok, parts={"exact_answer": 1.0, "format": 0.0}, parsed="right"),
        RewardResult(value=None, status=RewardStatus.UNPARSABLE, parts={"format": 0.0}),
    ]


def test_several_processes_keep_the_order_of_the_items() -> None:
    with VerifierPool(callable_spec(num_verifier_processes=2), allow_python_callables=True) as pool:
        values = [result.value for result in pool.score([item(str(i), answer=str(i % 3)) for i in range(20)])]
    assert values == [1.0, 1.0, 1.0] + [0.0] * 17


def test_r10_known_good_answer_that_does_not_score_one_is_named() -> None:
    # The reward looks for '####', but a right answer is said to look like plain text.
    spec = RewardsSpec.model_validate({"terms": [{"name": "exact_answer", "options": {"pattern": r"#### (\S+)"}}]})
    rows = [PromptRow(prompt_id="e/1", environment="e", prompt="p", answer="7")]
    with VerifierPool(spec, allow_python_callables=False) as pool:
        assert pool.gold_faults(rows) == [
            GoldFault(
                prompt_id="e/1",
                reasons=("exact_answer: the known-good completion '7' scores None instead of 1",),
            )
        ]


def test_gold_check_of_a_verifier_that_hangs_is_a_fault(pool: VerifierPool) -> None:
    spec = callable_spec(options={"example": "{answer}"})
    rows = [
        PromptRow(prompt_id="e/1", environment="e", prompt="p", answer="fine"),
        PromptRow(prompt_id="e/2", environment="e", prompt="p", answer="hang"),
        PromptRow(prompt_id="e/3", environment="e", prompt="p", answer="raise"),
    ]
    with VerifierPool(spec, allow_python_callables=True) as started:
        faults = started.gold_faults(rows)
    assert faults == [
        GoldFault(prompt_id="e/2", reasons=("timed_out: no reply within 1.0 s",)),
        GoldFault(prompt_id="e/3", reasons=("RuntimeError: broken verifier",)),
    ]


def test_verifier_process_ends_with_its_parent_even_when_that_is_killed() -> None:
    program = (
        "import sys\n"
        "from stages.rewards.process import VerifierProcess\n"
        "from stages.rewards.spec import RewardsSpec\n"
        "spec = RewardsSpec.model_validate({'terms': [{'name': 'exact_answer'}]})\n"
        "with VerifierProcess(spec) as process:\n"
        "    print(process._process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    with parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    ended, _, _ = select.select([child], [], [], 60)
    os.close(child)
    assert ended


def test_python_callable_without_permission_is_refused_before_anything_starts() -> None:
    with pytest.raises(SpecFaultsError, match="this deployment doesn't allow it"):
        VerifierPool(callable_spec(), allow_python_callables=False)


def test_function_that_cannot_be_loaded_stops_the_start() -> None:
    spec = RewardsSpec.model_validate(
        {"terms": [{"name": "python_callable", "options": {"target": "no_such_module_here:f"}}]}
    )
    with pytest.raises(RewardError, match="No module named 'no_such_module_here'"):
        VerifierPool(spec, allow_python_callables=True).__enter__()


def test_pool_used_before_its_start_says_so() -> None:
    with pytest.raises(ValueError, match="use it as a context manager"):
        VerifierPool(callable_spec(), allow_python_callables=True).score([item("right")])


def test_r9_constant_reward_and_shares_show_in_the_summary() -> None:
    results = [RIGHT, RIGHT, RewardResult(value=None, status=RewardStatus.TRUNCATED)]
    summary = summarise_rewards(results)
    assert summary.num_by_status == {"ok": 2, "unparsable": 0, "truncated": 1, "timed_out": 0, "crashed": 0}
    assert (summary.mean, summary.is_constant, summary.truncated_fraction) == (1.0, True, 1 / 3)


def test_summary_of_nothing_has_no_mean() -> None:
    assert (summarise_rewards([]).mean, summarise_rewards([]).is_constant) == (None, False)


def test_r12_verifiers_that_fail_on_everything_stop_the_run() -> None:
    crashed = RewardResult(value=None, status=RewardStatus.CRASHED, error="judge: boom")
    with pytest.raises(RewardError, match=r"failed on all 2 completions .* first error: judge: boom"):
        check_verifiers_work([crashed, crashed, RewardResult(value=None, status=RewardStatus.TRUNCATED)])
    assert check_verifiers_work([crashed, RIGHT]) is None
