from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cli.deployment_settings import named_settings
from cli.doctor_checks import Verdict, _settings
from cli.doctor_run import _alerts, _movement
from cli.run_lookup import FoundRun
from stages.home import MotleyHome
from stages.run_entry import MachineEntry, RunEntry
from storage.alerts import Alert, write_alert
from storage.runs import IterationRecord, RunRecord, create_run
from storage.store import open_store


def found_of(tmp_path: Path, text: str | None) -> tuple[Verdict, str]:
    if text is not None:
        (tmp_path / "settings.yaml").write_text(text)
    finding = _settings({"MOTLEY_HOME": str(tmp_path)})
    return finding.verdict, finding.found


@pytest.mark.parametrize(
    ("text", "verdict", "words"),
    [
        (None, Verdict.GOOD, "none: alerts are logged only"),
        ("alerts: {notifiers: [{call: stages.settings.Anything}]}", Verdict.GOOD, "alerts go to 1 notifier(s)"),
        ("alerts: {notifiers: [{call: no_such_package.mail.Mail}]}", Verdict.BAD, "names no_such_package.mail.Mail"),
        ("redaction: {call: no_such_package.clean}", Verdict.BAD, "names no_such_package.clean"),
        ("alert: {}", Verdict.BAD, "alert: Extra inputs"),
    ],
)
def test_doctor_says_whether_the_settings_can_be_used(
    tmp_path: Path, text: str | None, verdict: Verdict, words: str
) -> None:
    found = found_of(tmp_path, text)
    assert found[0] is verdict
    assert words in found[1]


def test_doctor_shows_the_alerts_of_the_last_day_and_what_no_notifier_took(tmp_path: Path) -> None:
    store, now = open_store(str(tmp_path)), datetime.now(UTC)
    facts = {"run": "r", "iteration": 3, "sentence": "look", "raised_at": now}
    write_alert(store, Alert(kind="stalled", matter="stalled-000003", **facts))
    write_alert(store, Alert(kind="disk", matter="alarm-disk", faults=("a.Mail: no server",), **facts))
    old = {**facts, "raised_at": now - timedelta(days=2)}
    write_alert(store, Alert(kind="failed", matter="failed-000002-a", **old))
    found = _alerts("run r", FoundRun(name="r", store=store, entry=None))
    assert [(item.verdict, item.found.split(": ", 1)[1]) for item in found] == [
        (Verdict.NOTE, "look"),
        (Verdict.BAD, "a.Mail: no server"),
    ]


def test_workers_of_this_computer_are_led_to_the_deployments_settings(tmp_path: Path) -> None:
    home = MotleyHome(tmp_path)
    assert named_settings(home, {}) == {}
    home.settings_file.write_text("")
    assert named_settings(home, {}) == {"MOTLEY_SETTINGS": str(tmp_path / "settings.yaml")}
    assert named_settings(home, {"MOTLEY_SETTINGS": "/etc/motley.yaml"}) == {}


@pytest.mark.parametrize(
    ("ago_s", "verdict", "words"),
    [
        (9000.0, Verdict.BAD, "(usual: 20 s): training waits for generation of iteration 3"),
        (5.0, Verdict.GOOD, "iteration(s) at work: none yet"),
    ],
)
def test_doctor_says_of_a_run_that_stands_still_who_waits_for_whom(
    tmp_path: Path, ago_s: float, verdict: Verdict, words: str
) -> None:
    store, end = open_store(str(tmp_path)), datetime.now(UTC) - timedelta(seconds=ago_s)
    entry = RunEntry(
        run="r",
        roots={"here": str(tmp_path)},
        machines=(MachineEntry(name="m", queue="m", region="here"),),
        iterations=9,
    )
    create_run(store, RunRecord(run="r", job={}, cluster={}, num_iterations=9, seeds={}, created_at=end))
    record = IterationRecord(run="r", iteration=2, started_at=end - timedelta(seconds=20), ended_at=end)
    found = _movement(FoundRun(name="r", store=store, entry=entry), entry, 3, [], [record])
    assert found.verdict is verdict
    assert words in found.found
