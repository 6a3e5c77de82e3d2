from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from storage.alerts import Alert, list_alerts, read_alert, write_alert
from storage.errors import CorruptObjectError
from storage.layout import alert
from storage.parsed_keys import Kind, parse_key
from storage.runs import RunRecord, create_run
from storage.store import Store, open_store
from storage.verify import verify_run
from tests.helpers.storage_builders import NOW, RUN


def raised(matter: str = "alarm-disk", **changes: Any) -> Alert:
    facts: dict[str, Any] = {
        "run": RUN, "iteration": 3, "kind": "disk", "matter": matter, "sentence": "full", "raised_at": NOW
    }  # fmt: skip
    return Alert(**{**facts, **changes})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def test_the_last_alert_of_each_matter_is_kept_and_listed_newest_first(store: Store) -> None:
    write_alert(store, raised(sentence="old"))
    write_alert(store, raised(raised_at=NOW + timedelta(hours=1), delivered_to=("a.B",)))
    write_alert(store, raised("stalled-000003", raised_at=NOW + timedelta(hours=2)))

    assert [item.matter for item in list_alerts(store, RUN)] == ["stalled-000003", "alarm-disk"]
    found = read_alert(store, RUN, "alarm-disk")
    assert found is not None
    assert (found.sentence, found.delivered_to) == ("full", ("a.B",))
    assert read_alert(store, RUN, "other") is None


@pytest.mark.parametrize(
    ("before", "is_due"),
    [
        (None, True),
        (raised(raised_at=NOW - timedelta(seconds=99)), False),
        (raised(raised_at=NOW - timedelta(seconds=100)), True),
        (raised(raised_at=NOW - timedelta(seconds=1), faults=("the server was away",)), True),
    ],
)
def test_a_matter_is_told_again_after_a_pause_or_when_it_was_refused(before: Alert | None, is_due: bool) -> None:
    assert raised().is_due_after(before, 100.0) is is_due


def test_verify_knows_alerts_and_names_damaged_ones(store: Store) -> None:
    create_run(store, RunRecord(run=RUN, job={}, cluster={}, num_iterations=1, seeds={}, created_at=NOW))
    write_alert(store, raised())
    key = alert(RUN, "alarm-disk")
    assert parse_key(key).kind is Kind.ALERT
    assert parse_key(key).name == "alarm-disk"
    assert not [finding for finding in verify_run(store, RUN).findings if finding.key == key]

    store.publish(key, b"{")
    assert list_alerts(store, RUN) == []
    assert [finding.key for finding in verify_run(store, RUN).findings if "alerts" in finding.key] == [key]
    with pytest.raises(CorruptObjectError):
        read_alert(store, RUN, "alarm-disk")
