"""Names that alarms have in records; apart from `stages.alarms` because Airflow's processes read them."""

from __future__ import annotations

from typing import Final

NON_FINITE: Final = "non_finite"
DRIFT: Final = "drift"
DISK: Final = "disk"
SETTINGS: Final = "settings"
"""Kinds of alarms beside the troubles of `stages.rollout_statistics`."""

KINDS_FIELD: Final = "alarm_kinds"
"""Field of a record's metadata: the kind of each of its alarms, in their order."""
