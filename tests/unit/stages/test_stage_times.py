from __future__ import annotations

from pathlib import Path

import pytest

from stages.contract import StageName, StageResult, StageStatus
from stages.stage_times import ORDER, read_results, stage_times, waits_between


def result(stage: StageName, start: float, end: float, *, fingerprint: str = "f", **changes: object) -> StageResult:
    fields = {
        "stage": stage, "run": "r", "iteration": 1, "fingerprint": f"{stage}-{fingerprint}", "status": StageStatus.OK,
        "started_at": start, "ended_at": end, "phases_s": {"work": end - start},
    }  # fmt: skip
    return StageResult.model_validate({**fields, **changes})


def test_times_of_an_iteration_with_gaps_and_overhead() -> None:
    times = stage_times(
        [
            result(StageName.PLAN, 0.0, 1.0),
            result(StageName.GENERATE, 2.0, 6.0, fingerprint="a"),
            result(StageName.GENERATE, 2.5, 7.0, fingerprint="b"),
            result(StageName.TRAIN, 8.0, 10.0),
        ]
    )

    assert times.measured_s == {"plan": 1.0, "generate": 5.0, "train": 2.0}
    assert times.phases_s["generate"] == {"work": 4.5}
    assert times.gaps_s == {"plan->generate": 1.0, "generate->train": 1.0}
    assert times.overhead_fraction() == pytest.approx(0.2)
    assert (times.started_at, times.ended_at) == (0.0, 10.0)
    assert [sentence.split(":")[0] for sentence in times.missing] == ["infer", "commit_policy", "weight_sync"]


def test_no_stage_of_an_iteration_is_taken_for_a_gap() -> None:
    """Every stage with an order works from its start to its end: nothing of that is overhead."""
    inside = [stage for stages in ORDER for stage in stages]
    times = stage_times([result(stage, float(place), place + 1.0) for place, stage in enumerate(inside)])

    aside = {StageName.PROFILE, StageName.REPORT, StageName.REPLICATE}  # before, after and beside the iteration's work
    assert set(inside) == set(StageName) - aside
    assert (times.overhead_fraction(), times.missing) == (0.0, [])


def test_a_repeated_stage_does_not_hide_the_attempt_that_worked() -> None:
    times = stage_times(
        [
            result(StageName.TRAIN, 0.0, 1.0, status=StageStatus.FAILED),
            result(StageName.TRAIN, 2.0, 9.0),
            result(StageName.TRAIN, 20.0, 20.1, reused=True),
        ]
    )

    assert times.measured_s == {"train": 7.0}


def test_nothing_found_is_said() -> None:
    times = stage_times([])

    assert (times.started_at, times.overhead_fraction(), len(times.missing)) == (None, None, 6)


def test_results_are_read_from_the_job_folders_of_the_iteration(tmp_path: Path) -> None:
    wanted = result(StageName.TRAIN, 2.0, 9.0)
    for iteration, text in ((1, wanted.model_dump_json()), (2, wanted.model_dump_json()), (1, "{torn")):
        folder = tmp_path / "jobs" / "r" / f"{iteration:06d}" / "train" / "f" / f"attempt-{len(text)}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(text)

    assert read_results(tmp_path, "r", 1) == [wanted]
    assert read_results(tmp_path, "r", 2) == []  # a result of another iteration lies there


def test_waiting_for_an_earlier_iteration_is_told_from_overhead() -> None:
    """Rollouts of iteration 1 are scored at 6; iteration 0 is committed at 16, and training of 1 begins at 17."""
    before = stage_times(
        [
            result(StageName.GENERATE, -5.0, -2.0), result(StageName.INFER, -2.0, -1.0),
            result(StageName.TRAIN, 0.0, 15.0), result(StageName.COMMIT_POLICY, 15.0, 16.0),
            result(StageName.WEIGHT_SYNC, 16.5, 18.0),
        ]
    )  # fmt: skip
    after = stage_times(
        [
            result(StageName.PLAN, 0.0, 1.0), result(StageName.GENERATE, 1.0, 5.0), result(StageName.INFER, 5.0, 6.0),
            result(StageName.TRAIN, 17.0, 20.0),
        ]
    )  # fmt: skip

    waits = waits_between(before, after)

    assert (waits.turn_s, waits.generation_idle_s, waits.training_idle_s) == (10.0, 2.0, 1.0)
    assert after.overhead_fraction() == pytest.approx(11 / 20)
    assert after.overhead_fraction(10.0) == pytest.approx(1 / 10)
    assert (before.publish_lag_s, after.publish_lag_s) == (2.0, None)


def test_waits_of_unknown_times_are_unknown() -> None:
    waits = waits_between(stage_times([]), stage_times([result(StageName.TRAIN, 0.0, 1.0)]))
    assert (waits.turn_s, waits.generation_idle_s, waits.training_idle_s) == (None, None, None)
