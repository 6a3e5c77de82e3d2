from __future__ import annotations

from pathlib import Path

import pytest

from stages import profile
from stages.device_probe import rate_per_s
from stages.errors import DeadlineError
from stages.timing import Deadline
from storage.runs import read_profile
from tests.helpers.stage_contexts import make_context, make_run


@pytest.mark.parametrize(("iteration", "every", "expected"), [(0, 0, 0), (7, 0, 0), (7, 3, 6), (6, 3, 6)])
def test_last_due_measurement(iteration: int, every: int, expected: int) -> None:
    assert profile.last_due(iteration, every) == expected


def test_machine_is_measured_once_and_then_reused(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    first = profile.run_stage(make_context(run, tmp_path, "profile", 0))
    second = profile.run_stage(make_context(run, tmp_path, "profile", 3))

    document = read_profile(make_context(run, tmp_path, "profile", 0).home, "r", 0, "a0")
    assert (first.reused, second.reused) == (False, True)
    assert first.artefacts == second.artefacts == ("r/profiles/0/a0.json",)
    assert (document["format"], document["machine"], document["device"], document["threads"]) == (
        "motley.profile/1", "a0", "cpu", 2,
    )  # fmt: skip
    assert document["flop_per_s"]["fp32"] > 1e8
    assert document["memory_bytes_per_s"] > 1e7
    assert document["memory_bytes"] > 2**28
    assert document["device_name"]
    assert set(document["storage"]) == {"write_latency_s", "read_latency_s", "write_bytes_per_s", "read_bytes_per_s"}
    assert list((tmp_path / "a" / "_probe").glob("*")) == []  # nothing is left of the probe


def test_rate_is_that_of_the_best_round() -> None:
    calls: list[int] = []

    rate = rate_per_s(1.0, lambda: calls.append(1), lambda: None)

    assert rate > 0
    assert len(calls) > 2


def test_measurement_waits_until_the_machine_is_free(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    busy, context = (make_context(run, tmp_path, "profile", 0) for _ in range(2))
    context.deadline = Deadline(clock=context.clock, ends_at=context.clock.monotonic() - 1)
    with busy.machine_to_itself(), pytest.raises(DeadlineError, match="machine a0 is held by pid"):
        profile.measure(context)
