"""When the reported balance of an asynchronous run calls for another plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages import plan as plan_stage
from stages.context import StageContext
from stages.staleness.drift_watch import has_drifted, rerouted_plan
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
    # One replica leaves no shares to shift, so the search is asked.
    monkeypatch.setattr(plan_stage, "rerouted_plan", lambda *_: None)
    entry, is_new = plan_stage.ensure_plan(context)

    assert (len(searches), entry.number, is_new) == (1, 0, False)


def test_shares_are_left_alone_without_drift(tmp_path: Path) -> None:
    context = context_at(tmp_path, 3)
    report(context, 0.1, 0.1)

    assert rerouted_plan(context, None) is None
    assert rerouted_plan(context, plan_stage.ensure_plan(context)[0]) is None
