from __future__ import annotations

from collections import namedtuple
from math import log
from pathlib import Path

import pytest

from stages.alarms import disk_alarms, drift_alarms, drifts_of, non_finite_alarms, trouble_alarms
from storage.runs import IterationRecord

Usage = namedtuple("Usage", "total used free")


def test_troubles_that_last_have_their_name_as_kind() -> None:
    (alarm,) = trouble_alarms([["no_signal"], ["constant_reward", "no_signal"], ["no_signal"]], 3)
    assert alarm.kind == "no_signal"
    assert alarm.sentence.startswith("no_signal in 3 iterations in a row: ")


def test_skipped_optimizer_steps_raise_an_alarm() -> None:
    assert non_finite_alarms([{"is_skipped": False}]) == []
    (alarm,) = non_finite_alarms([{"is_skipped": False}, {"is_skipped": True}])
    assert alarm.kind == "non_finite"
    assert alarm.sentence.startswith("1 of 2 optimizer steps were skipped")


@pytest.mark.parametrize(
    ("drifts", "is_raised"),
    [
        ([log(1.6)] * 3, True),
        ([log(1.4), log(1.6), log(1.6)], False),
        ([log(1.6)] * 2, False),
        ([log(1.6), None, log(1.6)], False),
        ([0.0, log(1.6), log(1.6), log(9.0)], True),
    ],
)
def test_drift_needs_confirmation(drifts: list[float | None], is_raised: bool) -> None:
    found = drift_alarms(drifts, limit=0.5, confirm=3)
    assert bool(found) is is_raised
    if found:
        assert "more than 1.5 for 3 iterations in a row" in found[0].sentence


def test_drifts_of_records_that_are_not_there_are_unknown() -> None:
    record = IterationRecord(run="r", iteration=1, metrics={"balance_drift": 0.25})
    assert drifts_of([None, record], 0.5) == [None, 0.25, 0.5]


def test_each_disk_below_the_deployments_limit_raises_one_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path))
    (tmp_path / "settings.yaml").write_text("alerts: {min_free_gb: 10}")
    free = {"bytes": 10.5e9}
    monkeypatch.setattr("stages.alarms.shutil.disk_usage", lambda _: Usage(1, 1, free["bytes"]))
    folders = {"the machine's state": tmp_path / "state" / "a", "the object store": tmp_path / "store"}
    assert disk_alarms(folders) == []

    free["bytes"] = 9.5e9
    (alarm,) = disk_alarms(folders)
    assert alarm.kind == "disk"
    assert alarm.sentence.startswith(f"the machine's state, {tmp_path}/state/a, has 9.50 GB left, less than the 10 GB")


def test_unusable_settings_are_an_alarm_and_no_failure_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path))
    (tmp_path / "settings.yaml").write_text("alerts: {min_free: 10}")
    (alarm,) = disk_alarms({"the machine's state": tmp_path})
    assert alarm.kind == "settings"
    assert "alerts.min_free: Extra inputs" in alarm.sentence
