"""When the reported balance of an asynchronous run calls for another plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plans.cost import price
from plans.plan import Plan
from stages import plan as plan_stage
from stages.context import StageContext
from stages.measured_rates import model_of
from stages.plan_history import NumberedPlan, committed_plans
from stages.planning import Flipped
from stages.staleness import drift_watch
from stages.staleness.drift_watch import cheaper_change, flipped_plan, has_drifted, rerouted_plan, side_factors
from stages.staleness.reroute import Rerouted
from storage.runs import IterationRecord, write_iteration
from tests.helpers.stage_contexts import make_context, make_run

ASYNCHRONOUS = {"mode: sync\n": "mode: async\nmax_staleness: 1\nreplan: {drift: 1.0, confirm: 2}\n"}


def context_at(base: Path, iteration: int, changes: dict[str, str] | None = None) -> StageContext:
    run = make_run(base, iterations=9, changes=ASYNCHRONOUS if changes is None else changes)
    return make_context(run, base, "plan", iteration, is_planned=False)


def report(context: StageContext, *drifts: float | None) -> None:
    for iteration, drift in enumerate(drifts):
        metrics = {"balance_drift": drift}
        write_iteration(context.home, IterationRecord(run=context.run.name, iteration=iteration, metrics=metrics))


@pytest.mark.parametrize(
    ("drifts", "is_due"),
    [
        ((0.9, 0.9), True),
        ((0.9, 0.1), False),
        ((0.9,), False),  # the second is not reported
        ((None, 0.9), False),  # nothing was measured in iteration 0
        ((0.9, 0.9, 0.9), True),  # iteration 2 is not certainly over when 3 begins: it isn't looked at
    ],
)
def test_lasting_drift_calls_at_the_iteration_that_sees_it(
    tmp_path: Path, drifts: tuple[float | None, ...], is_due: bool
) -> None:
    context = context_at(tmp_path, 3)
    report(context, *drifts)

    assert has_drifted(context, 0) is is_due


def test_iterations_before_the_plan_was_adopted_do_not_count(tmp_path: Path) -> None:
    context = context_at(tmp_path, 4)
    report(context, 0.9, 0.9, 0.1)

    assert not has_drifted(context, 2)


def test_synchronous_run_has_no_balance_to_watch(tmp_path: Path) -> None:
    context = context_at(tmp_path, 4, changes={})
    report(context, 0.9, 0.9, 0.9)

    assert not has_drifted(context, 0)


def test_drift_makes_the_plan_stage_search_and_an_equal_plan_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, searches, search = context_at(tmp_path, 3), [], plan_stage.choose_plan
    report(context, 0.9, 0.9)

    def counted(*args: object, **kwargs: object) -> object:
        searches.append(1)
        return search(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(plan_stage, "choose_plan", counted)
    # One replica leaves no shares to shift, and nothing is known of the sides' seconds, so the search is asked.
    monkeypatch.setattr(drift_watch, "rerouted_plan", lambda *_: None)
    entry, is_new = plan_stage.ensure_plan(context)

    assert (len(searches), entry.number, is_new) == (1, 0, False)


def test_nothing_is_changed_without_drift(tmp_path: Path) -> None:
    context = context_at(tmp_path, 3)
    report(context, 0.1, 0.1)

    assert cheaper_change(context, plan_stage.ensure_plan(context)[0], {}) is None


def reported(context: StageContext, producer: float, consumer: float) -> NumberedPlan:
    """Report two iterations whose sides took so many times what the plan in force promises."""
    standing = committed_plans(context.home, context.run.name)[0]
    model = model_of(context.run.cluster, context.job.planner, {})
    phases = price(context.run.cluster, context.job.planner, standing.plan, model).phases
    assert phases is not None
    measured = {
        "generate": producer * phases.generation_s, "infer": producer * phases.inference_s,
        "train": consumer * phases.training_s, "weight_sync": consumer * phases.transfer_s,
    }  # fmt: skip
    for iteration in range(2):
        record = IterationRecord(
            run=context.run.name, iteration=iteration, metrics={"balance_drift": 2.0}, measured_s=measured
        )
        write_iteration(context.home, record)
    return standing


def test_factors_are_measured_over_promised_seconds_of_each_side(tmp_path: Path) -> None:
    context = context_at(tmp_path, 3)
    standing = reported(context, 5.0, 0.5)

    factors = side_factors(context, standing, {})

    assert factors is not None
    assert (factors.producer, factors.consumer) == (pytest.approx(5.0), pytest.approx(0.5))


def test_sides_without_measured_seconds_have_no_factors_and_no_flip(tmp_path: Path) -> None:
    context = context_at(tmp_path, 3)
    report(context, 0.9, 0.9)
    standing = committed_plans(context.home, context.run.name)[0]

    assert side_factors(context, standing, {}) is None
    assert flipped_plan(context, standing, {}) is None


def test_iteration_without_a_record_has_no_factors(tmp_path: Path) -> None:
    context = context_at(tmp_path, 3)

    assert side_factors(context, committed_plans(context.home, context.run.name)[0], {}) is None


def flip_of(plan: Plan, before_s: float, after_s: float) -> Flipped:
    """Return a flip whose plan exchanges two devices."""
    text = plan.to_json().replace("a0/0", "x").replace("b0/0", "a0/0").replace("x", "b0/0")
    return Flipped(Plan.model_validate_json(text), before_s, after_s)


@pytest.mark.parametrize(
    ("switch_s", "before_s", "after_s", "is_taken"),
    [
        (30.0, 20.0, 10.0, True),  # 10 s in each of the 6 iterations left are more than 30 s
        (30.0, 20.0, 15.0, False),  # 5 s in each are not
        (29.0, 20.0, 15.0, True),
        (0.0, 20.0, 19.0, False),  # less than min_gain
        (0.0, 20.0, 21.0, False),
    ],
)
def test_flip_must_gain_enough_to_win_back_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch_s: float, before_s: float, after_s: float, is_taken: bool
) -> None:
    changes = {
        "mode: sync\n": f"mode: async\nmax_staleness: 1\nreplan: {{drift: 1.0, confirm: 2, switch_s: {switch_s}}}\n"
    }
    context = context_at(tmp_path, 3, changes)
    standing = reported(context, 5.0, 1.0)
    flip = flip_of(standing.plan, before_s, after_s)
    monkeypatch.setattr(drift_watch, "flip_roles", lambda *_, **__: flip)

    assert flipped_plan(context, standing, {}) == (flip.plan if is_taken else None)


def test_change_is_the_cheapest_that_gains_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other shares come before other roles, and both before a search."""
    context = context_at(tmp_path, 3)
    standing = reported(context, 5.0, 1.0)
    flip = flip_of(standing.plan, 100.0, 1.0)
    asked: list[str] = []

    def noted(name: str, answer: object) -> object:
        return lambda *_, **__: asked.append(name) or answer

    monkeypatch.setattr(drift_watch, "rerouted_plan", noted("shares", None))
    monkeypatch.setattr(drift_watch, "flip_roles", noted("roles", flip))
    monkeypatch.setattr(plan_stage, "choose_plan", noted("search", None))
    entry, is_new = plan_stage.ensure_plan(context)

    assert (asked, is_new, entry.adopted_at) == (["shares", "roles"], True, 3)
    assert entry.plan.tasks == flip.plan.tasks


def test_plan_with_other_shares_promises_what_these_shares_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next drift is measured against the new plan's promise, not against that of the old shares."""
    context = context_at(tmp_path, 3)
    standing = reported(context, 5.0, 1.0)
    dealt = standing.plan.model_copy(update={"predicted": {"of": "the old shares"}})
    monkeypatch.setattr(drift_watch, "all_shards", lambda *_: [])
    monkeypatch.setattr(drift_watch, "reroute", lambda *_: Rerouted(dealt, 1.0))

    found = rerouted_plan(context, standing, {})

    model = model_of(context.run.cluster, context.job.planner, {})
    assert found is not None
    assert found.predicted == price(context.run.cluster, context.job.planner, found, model).to_document()


def test_plan_with_a_drained_machine_is_not_changed_but_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other shares of a plan that uses a drained machine would use it still."""
    context = context_at(tmp_path, 3)
    standing = reported(context, 5.0, 1.0)
    gone = next(
        m for m in ("b0", "a0") if m in {gpu.partition("/")[0] for p in standing.plan.tasks.values() for gpu in p.gpus}
    )
    context.run = replace(context.run, drained=(gone,))
    monkeypatch.setattr(drift_watch, "rerouted_plan", lambda *_: standing.plan)
    monkeypatch.setattr(plan_stage, "choose_plan", lambda *_, **__: flip_of(standing.plan, 1.0, 1.0).plan)

    entry, is_new = plan_stage.ensure_plan(context)

    assert is_new
    assert entry.plan.tasks != standing.plan.tasks
