"""Alarms of the report: trouble that lasts over iterations is told, from the records that were committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.report import _alarms
from stages.rollout_statistics import TROUBLE_WORDS
from storage.runs import IterationRecord, write_iteration
from tests.helpers.stage_contexts import make_context, make_run


def alarms(folder: Path, history: list[list[str] | None], steps: list[dict] | None = None) -> list[str]:
    """Return the alarms of the last iteration of a history; None stands for an iteration without a record."""
    run = make_run(folder)
    context = make_context(run, folder, "report", len(history) - 1)
    for iteration, troubles in enumerate(history[:-1]):
        if troubles is not None:
            write_iteration(
                context.home, IterationRecord(run="r", iteration=iteration, metadata={"troubles": troubles})
            )
    return [alarm.sentence for alarm in _alarms(context, history[-1] or [], steps or [], None)]


@pytest.mark.parametrize("trouble", sorted(TROUBLE_WORDS))
def test_trouble_of_three_iterations_in_a_row_is_an_alarm(tmp_path: Path, trouble: str) -> None:
    assert alarms(tmp_path, [[trouble], [trouble], [trouble]]) == [
        f"{trouble} in 3 iterations in a row: {TROUBLE_WORDS[trouble]}"
    ]


@pytest.mark.parametrize(
    "history",
    [
        [["constant_reward"], ["constant_reward"]],
        [["constant_reward"], [], ["constant_reward"]],
        [["constant_reward"], None, ["constant_reward"]],
        [["constant_reward"], ["constant_reward"], []],
        [["constant_reward"], ["all_truncated"], ["no_signal"]],
    ],
)
def test_trouble_that_does_not_last_is_none(tmp_path: Path, history: list[list[str] | None]) -> None:
    assert alarms(tmp_path, history) == []


def test_steps_that_were_skipped_are_an_alarm_at_once(tmp_path: Path) -> None:
    steps = [{"is_skipped": True}, {"is_skipped": False}]
    assert alarms(tmp_path, [[]], steps) == [
        "1 of 2 optimizer steps were skipped: loss or gradient was not finite; the rows are dumped beside the "
        "trainer's state"
    ]
