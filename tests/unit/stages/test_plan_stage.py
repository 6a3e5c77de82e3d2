from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plans.plan import Plan
from stages import plan as plan_stage
from stages.errors import ContractError
from stages.plan_history import committed_plans, plan_of_iteration
from storage.runs import read_plan
from tests.helpers.stage_contexts import make_context, make_run


def test_plan_is_decided_once_and_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    contexts = [make_context(run, tmp_path, "plan", k) for k in (0, 1, 4)]

    outcomes = [plan_stage.run_stage(context) for context in contexts]

    assert [outcome.metrics["plan"] for outcome in outcomes] == [0, 0, 0]
    assert outcomes[0].metrics["queues"] == {"generate": ["a0"], "infer": ["a0"], "train": ["a0"]}
    assert read_plan(contexts[0].home, "r", 0)["format"] == "motley.plan/1"


def test_new_placement_gets_a_number_and_earlier_iterations_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    first = make_context(run, tmp_path, "plan", 0).plan
    replica = first.tasks[next(iter(first.tasks))].replicas[0]
    assert replica.stages[0].gpus == ("a0/0", "a0/1")

    def other_plan(*_: object, **__: object) -> Plan:
        return Plan.model_validate_json(first.to_json().replace('"single-machine"', '"other"').replace("a0/1", "a0/9"))

    monkeypatch.setattr(plan_stage, "choose_plan", other_plan)
    monkeypatch.setattr(plan_stage, "is_due", lambda *_: True)
    third = make_context(run, tmp_path, "plan", 3, is_planned=False)
    entry, is_new = plan_stage.ensure_plan(third)
    again, is_new_again = plan_stage.ensure_plan(make_context(run, tmp_path, "plan", 3))
    earlier, is_new_earlier = plan_stage.ensure_plan(make_context(run, tmp_path, "plan", 2, is_planned=False))

    assert (entry.number, is_new, again.number, is_new_again, earlier.number, is_new_earlier) == (
        1, True, 1, False, 0, False,
    )  # fmt: skip
    plans = committed_plans(third.home, "r")
    used = [plan_of_iteration(plans, k) for k in range(5)]
    assert [entry.number for entry in used if entry is not None] == [0, 0, 0, 1, 1]


def plans_of_its_own(first: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every search find another placement."""
    found = iter(range(100))

    def next_plan(*_: object, **__: object) -> Plan:
        return Plan.model_validate_json(first.to_json().replace("a0/1", f"a0/{9 + next(found)}"))

    monkeypatch.setattr(plan_stage, "choose_plan", next_plan)
    monkeypatch.setattr(plan_stage, "is_due", lambda *_: True)


def test_overlapping_iterations_never_share_a_plan_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While iteration 1 searches, iteration 2 commits the number that 1 was about to take."""
    run = make_run(tmp_path)
    plans_of_its_own(make_context(run, tmp_path, "plan", 0).plan, monkeypatch)
    first, second = (make_context(run, tmp_path, "plan", k, is_planned=False) for k in (1, 2))
    search = plan_stage.choose_plan

    def overtaken(*args: Any, **kwargs: Any) -> Plan:
        monkeypatch.setattr(plan_stage, "choose_plan", search)
        assert plan_stage.ensure_plan(second)[0].number == 1
        return search(*args, **kwargs)

    monkeypatch.setattr(plan_stage, "choose_plan", overtaken)
    entry, is_new = plan_stage.ensure_plan(first)

    assert (entry.number, is_new) == (0, False)
    assert [plan.adopted_at for plan in committed_plans(first.home, "r")] == [0, 2]
    assert (first.plan_number, second.plan_number) == (0, 1)


def test_decision_of_an_iteration_stands_when_an_earlier_one_decides_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    later = make_context(run, tmp_path, "plan", 2)  # keeps plan 0
    plans_of_its_own(later.plan, monkeypatch)
    earlier = make_context(run, tmp_path, "plan", 1, is_planned=False)

    assert plan_stage.ensure_plan(earlier)[0].number == 1
    assert make_context(run, tmp_path, "generate", 2).plan_number == 0
    assert make_context(run, tmp_path, "generate", 3).plan_number == 2


def test_plan_committed_before_a_crash_is_taken_by_the_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "plan", 1, is_planned=False)
    plans_of_its_own(make_context(run, tmp_path, "plan", 0).plan, monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_stage, "decide_plan", _killed)
        with pytest.raises(InterruptedError):
            plan_stage.ensure_plan(context)

    assert plan_stage.ensure_plan(context)[0].number == 1
    assert len(committed_plans(context.home, "r")) == 2


def _killed(*_: object) -> int:
    raise InterruptedError


def test_equal_placement_keeps_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr(plan_stage, "is_due", lambda *_: True)

    entry, is_new = plan_stage.ensure_plan(make_context(run, tmp_path, "plan", 2, is_planned=False))

    assert (entry.number, is_new) == (0, False)


def test_stage_without_a_plan_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "generate", 1, is_planned=False)

    with pytest.raises(ContractError, match="iteration 1 has no plan yet; run stage plan for it first"):
        _ = context.plan
