from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plans.cost import CostModel
from plans.plan import Plan
from stages import plan as plan_stage
from stages.errors import ContractError
from stages.plan_history import ADOPTED_BECAUSE, committed_plans, plan_of_iteration
from stages.single_machine_plan import plan_on_machine
from storage.runs import read_plan
from tests.helpers.stage_contexts import make_context, make_run


def test_plan_is_decided_once_and_kept(tmp_path: Path) -> None:
    """H4: the job says nothing of placement, the planner in the box decides it."""
    run = make_run(tmp_path)
    contexts = [make_context(run, tmp_path, "plan", k) for k in (0, 1, 4)]

    outcomes = [plan_stage.run_stage(context) for context in contexts]

    assert [outcome.metrics["plan"] for outcome in outcomes] == [0, 0, 0]
    assert outcomes[0].metrics["queues"] == plan_stage.queues_of(contexts[0].plan, run.cluster)
    document = read_plan(contexts[0].home, "r", 0)
    assert (document["format"], document["method"], document["search"]["seed"]) == ("motley.plan/1", "sha-ea", run.seed)


def test_new_placement_gets_a_number_and_earlier_iterations_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    first = make_context(run, tmp_path, "plan", 0).plan
    exchanged = first.to_json().replace("a0/0", "a0/x").replace("a0/1", "a0/0").replace("a0/x", "a0/1")
    assert Plan.model_validate_json(exchanged).fingerprint != first.fingerprint

    def other_plan(*_: object, **__: object) -> Plan:
        return Plan.model_validate_json(exchanged)

    monkeypatch.setattr(plan_stage, "is_better", lambda *_: True)
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
    monkeypatch.setattr(plan_stage, "is_better", lambda *_: True)
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


def test_new_plan_must_promise_the_gain_that_the_job_asks_for(tmp_path: Path) -> None:
    run = make_run(tmp_path, changes={"mode: sync\n": "mode: sync\nreplan: {switch_s: 0}\n"})
    context = make_context(run, tmp_path, "plan", 3)
    lonely = plan_on_machine(run.cluster, run.job.planner, run.cluster.machines[1], CostModel.calibrated())

    assert plan_stage.is_better(context, lonely, context.plan)
    assert not plan_stage.is_better(context, context.plan, lonely)
    assert not plan_stage.is_better(context, context.plan, context.plan)


def test_new_plan_must_win_back_the_switch_in_the_iterations_left(tmp_path: Path) -> None:
    """H9: a run is balanced anew between iterations, and only where that pays for what the switch costs."""
    run = make_run(tmp_path, changes={"mode: sync\n": "mode: sync\nreplan: {switch_s: 1.0e+6}\n"})
    context = make_context(run, tmp_path, "plan", 3)
    lonely = plan_on_machine(run.cluster, run.job.planner, run.cluster.machines[1], CostModel.calibrated())

    assert not plan_stage.is_better(context, lonely, context.plan)


def test_drained_machine_is_left_at_the_next_plan_and_taken_back_later(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    contexts = [make_context(run, tmp_path, "plan", k, is_planned=False) for k in (2, 3, 4)]
    assert "b0" in str(committed_plans(contexts[0].home, "r")[0].plan.tasks)
    for context in contexts[:2]:
        context.run = replace(run, drained=("b0",))

    second, is_new = plan_stage.ensure_plan(contexts[0])
    third, is_new_again = plan_stage.ensure_plan(contexts[1])
    fourth, _ = plan_stage.ensure_plan(contexts[2])

    assert (is_new, is_new_again, third.number) == (True, False, second.number)
    assert {gpu.partition("/")[0] for placed in second.plan.tasks.values() for gpu in placed.gpus} == {"a0"}
    assert plan_stage.is_usable(contexts[1], second.plan)
    # Taken back, it is planned with again; whether it gets work depends on the gain.
    assert plan_stage.is_due(contexts[2], second.plan)
    assert fourth.number >= second.number


def test_stage_without_a_plan_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "generate", 1, is_planned=False)

    with pytest.raises(ContractError, match="iteration 1 has no plan yet; run stage plan for it first"):
        _ = context.plan


def test_plan_says_why_it_came(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = make_context(run, tmp_path, "plan", 1)
    standing = committed_plans(context.home, "r")[0]
    assert (standing.plan.search.model_extra or {})[ADOPTED_BECAUSE] == "the first plan of the run"

    def why(*, changed: Plan | None = None, **changes: object) -> str:
        before = dataclasses.replace(standing, plan=standing.plan.model_copy(update=changes))
        return plan_stage.reason(context, before, changed)

    drained = standing.plan.search.model_copy(update={"drained": ["a9"]})
    assert why(cluster="other") == "the cluster changed"
    assert why(job="other") == "the job changed"
    assert why(search=drained) == "drained machines are now none"
    moved = Plan.model_validate_json(standing.plan.to_json().replace("a0/1", "a0/9"))
    assert why(changed=standing.plan) == "measured rates left what was promised; other shares of the same replicas"
    assert why(changed=moved) == "measured rates left what was promised; other roles for some devices"
    assert why().startswith("decided again every")
