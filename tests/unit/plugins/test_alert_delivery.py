from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("airflow.sdk")

from plugins.alert_delivery import deliver, notifier_class
from stages.errors import ContractError
from storage.alerts import Alert, read_alert
from storage.store import Store, open_store
from tests.helpers.kept_alerts import told, write_settings
from tests.helpers.storage_builders import NOW, RUN


def raised(after_s: float = 0.0, **changes: Any) -> Alert:
    facts: dict[str, Any] = {
        "run": RUN, "iteration": 7, "kind": "no_signal", "matter": "alarm-no_signal", "sentence": "nothing is learned",
        "raised_at": NOW + timedelta(seconds=after_s),
    }  # fmt: skip
    return Alert(**{**facts, **changes})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MOTLEY_SETTINGS", raising=False)
    return open_store(str(tmp_path / "store"))


def test_without_notifiers_an_alert_is_a_log_line_and_an_event_of_the_run(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        deliver(raised(), store, {})
    assert "ALERT no_signal: nothing is learned" in caplog.text
    assert read_alert(store, RUN, "alarm-no_signal") == raised()


def test_configured_notifiers_render_their_templates_with_the_alert(store: Store, tmp_path: Path) -> None:
    file = write_settings(tmp_path / "home", "FileNotifier")
    done = deliver(raised(), store, {"run_id": "scheduled__x"})
    assert told(file) == [f"no_signal of {RUN}: nothing is learned"]
    assert '"run_id"' in file.read_text()
    assert done.delivered_to == ("tests.helpers.kept_alerts.FileNotifier",)


def test_one_broken_notifier_keeps_no_other_from_being_told_and_is_tried_again(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_settings(tmp_path / "home", "BrokenNotifier", "Missing", "FileNotifier")
    done = deliver(raised(), store, {})
    assert len(told(file)) == 1
    assert done.faults[0].endswith("BrokenNotifier: ConnectionError: no route to the mail server")
    assert "kept_alerts.Missing can't be imported" in done.faults[1]
    assert done.faults[0] in caplog.text

    deliver(raised(1.0), store, {})
    assert len(told(file)) == 2


def test_a_lasting_alarm_is_told_again_after_the_pause_only(store: Store, tmp_path: Path) -> None:
    file = write_settings(tmp_path / "home", "FileNotifier", repeat_s=100.0)
    for after_s in (0.0, 40.0, 99.0, 101.0, 150.0):
        deliver(raised(after_s), store, {})
    assert len(told(file)) == 2
    deliver(raised(150.0, matter="alarm-disk"), store, {})
    assert len(told(file)) == 3


def test_unusable_settings_are_said_and_the_event_is_kept(store: Store, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "settings.yaml").write_text("alerts: 5")
    done = deliver(raised(), store, {})
    assert "settings.yaml can't be used: alerts: " in done.faults[0]
    assert read_alert(store, RUN, "alarm-no_signal") == done


@pytest.mark.parametrize("call", ["os.path.join", "stages.settings.DeploymentSettings"])
def test_what_is_no_notifier_is_refused(call: str) -> None:
    with pytest.raises(ContractError, match=r"no subclass of airflow\.sdk\.BaseNotifier"):
        notifier_class(call)


def test_airflows_own_mail_notifier_can_be_named(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smtp = pytest.importorskip("airflow.providers.smtp.notifications.smtp")
    sent: list[Any] = []
    monkeypatch.setattr(smtp.SmtpNotifier, "notify", lambda self, context: sent.append((self.subject, self.to)))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "settings.yaml").write_text(
        "alerts: {notifiers: [{call: airflow.providers.smtp.notifications.smtp.SmtpNotifier, with: {to: a@example.org, "
        "from_email: b@example.org, subject: 'Motley {{ alert.run }}: {{ alert.kind }}'}}]}"
    )
    deliver(raised(), store, {})
    assert sent == [(f"Motley {RUN}: no_signal", "a@example.org")]
