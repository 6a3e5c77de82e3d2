from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from stages.stall import last_word, stall_limit_s, usual_s, who_waits_now
from storage.regional_view import view_of
from storage.rollouts import write_rollouts
from storage.runs import IterationRecord
from storage.store import open_store
from tests.helpers.storage_builders import NOW, RUN, rollout_row


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


def test_who_waits_for_whom_follows_from_the_rollouts_of_the_iteration_that_is_trained_next(tmp_path: Path) -> None:
    """Shards lie in the regions that made them: the last one, in the other region, turns the sentence around."""
    near, far = (open_store(str(tmp_path / name)) for name in ("near", "far"))
    both = view_of([near, far])
    fields = {"input_fingerprint": "f", "created_by": "test"}
    assert who_waits_now(both, RUN, None) == "generation and training wait for the initial policy"
    write_rollouts(near, RUN, 2, 0, 2, [rollout_row(0, 0, 2)], **fields)
    assert who_waits_now(both, RUN, 2).startswith("training waits for generation of iteration 2")
    write_rollouts(far, RUN, 2, 1, 2, [rollout_row(1, 0, 2)], **fields)
    assert who_waits_now(both, RUN, 2).startswith("generation waits for inference and training of iteration 2")
    assert who_waits_now(both, RUN, 3).startswith("training waits for generation of iteration 3")
