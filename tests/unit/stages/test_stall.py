from __future__ import annotations

from datetime import timedelta

import pytest

from stages.stall import last_word, stall_limit_s, usual_s
from storage.runs import IterationRecord
from tests.helpers.storage_builders import NOW


def record(iteration: int, seconds: float | None) -> IterationRecord:
    end = None if seconds is None else NOW + timedelta(seconds=seconds)
    return IterationRecord(run="r", iteration=iteration, started_at=NOW, ended_at=end)


@pytest.mark.parametrize(
    ("seconds", "usual", "limit"),
    [
        ([], None, 600.0),
        ([None], None, 600.0),
        ([20.0, 30.0, 25.0], 25.0, 600.0),
        ([9000.0, 100.0, 100.0, 90.0, 110.0, 9000.0], 100.0, 1000.0),
        ([3600.0, None], 3600.0, 36_000.0),
    ],
)
def test_limit_follows_the_median_of_the_last_iterations(
    seconds: list[float | None], usual: float | None, limit: float
) -> None:
    records = [record(k, value) for k, value in enumerate(seconds)]
    assert usual_s(records) == usual
    assert stall_limit_s(records, 600.0) == stall_limit_s(records, None) == limit


def test_last_word_is_the_end_of_the_newest_iteration_that_has_one() -> None:
    assert last_word([]) is None
    assert last_word([record(0, 10.0), record(1, None)]) == NOW + timedelta(seconds=10)
