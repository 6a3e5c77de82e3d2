"""What people were told of a run: the last alert of every matter, beside the run's data.

An alarm that lasts is one matter, so it is told once and then again after a pause; each failure is a matter of its own.
Nothing reads alerts to decide anything about the run.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from storage.documents import model_bytes, read_model
from storage.errors import CorruptObjectError, ObjectMissingError
from storage.layout import alert, alerts_folder
from storage.store import Store

ALERT_FORMAT: Final = "motley.alert/1"

ALARM_MATTER: Final = "alarm-"
"""Start of the matters that are alarms of iterations: their records tell of them too."""


class Alert(BaseModel):
    """The document ``alerts/<matter>.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.alert/1"] = ALERT_FORMAT
    """Kind and version of this document."""
    run: str
    """Run name."""
    iteration: int = Field(ge=0)
    """RL iteration that it is about."""
    kind: str
    """What is wrong, e.g. ``constant_reward``, ``stalled``, ``failed``."""
    matter: str
    """What it is about, more narrowly: alerts of one matter replace each other."""
    sentence: str
    """What is so and what to do."""
    raised_at: datetime
    """When, UTC."""
    delivered_to: tuple[str, ...] = ()
    """Notifiers that took it, by class path."""
    faults: tuple[str, ...] = ()
    """Why other notifiers did not."""

    @property
    def is_alarm(self) -> bool:
        """Whether it is an alarm of an iteration, which its record tells of too."""
        return self.matter.startswith(ALARM_MATTER)

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON has them: what templates of notifiers see under ``alert``."""
        return self.model_dump(mode="json")

    def is_due_after(self, before: Alert | None, pause_s: float) -> bool:
        """Whether it is to be delivered although another one of its matter was raised before.

        Args:
            before: The last one of the matter; ``None`` is due, and so is one that a notifier refused.
            pause_s: Seconds from which on the same matter is worth telling again.
        """
        if before is None or before.faults:
            return True
        return self.raised_at - before.raised_at >= timedelta(seconds=pause_s)


def write_alert(store: Store, raised: Alert) -> None:
    """Write an alert over the last one of its matter."""
    key = alert(raised.run, raised.matter)
    store.publish(key, model_bytes(raised, key))


def read_alert(store: Store, run: str, matter: str) -> Alert | None:
    """Return the last alert of a matter, ``None`` without one. Raises ``CorruptObjectError``."""
    try:
        return read_model(store, alert(run, matter), Alert, ALERT_FORMAT)
    except ObjectMissingError:
        return None


def list_alerts(store: Store, run: str) -> list[Alert]:
    """Return the last alert of every matter, newest first, by listing (for people); damaged ones are left out."""
    found = []
    for info in store.list(alerts_folder(run)):
        try:
            found.append(read_model(store, info.key, Alert, ALERT_FORMAT))
        except (CorruptObjectError, ObjectMissingError):
            continue  # `motley verify` names it
    return sorted(found, key=lambda item: item.raised_at, reverse=True)
