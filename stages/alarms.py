"""Alarms of an iteration's report: what is wrong for so long, or so badly, that a person should look.

The report writes them into the iteration's record; `plugins.alert_callbacks` hands them to Airflow's notifiers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

from stages.alarm_names import DISK, DRIFT, NON_FINITE, SETTINGS
from stages.errors import ContractError
from stages.rollout_statistics import lasting_troubles
from stages.settings import read_settings
from stages.staleness.drift_watch import DRIFT_METRIC
from storage.runs import IterationRecord


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm."""

    kind: str
    """What is wrong, in one word."""
    sentence: str
    """What is so and what to do."""


def trouble_alarms(history: Sequence[Sequence[str]], num_iterations: int) -> list[Alarm]:
    """Return an alarm for every trouble that lasts; arguments as for `lasting_troubles`."""
    return [Alarm(kind, sentence) for kind, sentence in lasting_troubles(history, num_iterations).items()]


def non_finite_alarms(steps: Sequence[Mapping[str, Any]]) -> list[Alarm]:
    """Return an alarm if optimizer steps of the iteration were skipped."""
    skipped = sum(1 for step in steps if step["is_skipped"])
    if not skipped:
        return []
    sentence = (
        f"{skipped} of {len(steps)} optimizer steps were skipped: loss or gradient was not finite; the rows are "
        "dumped beside the trainer's state"
    )
    return [Alarm(NON_FINITE, sentence)]


def drift_alarms(drifts: Sequence[float | None], *, limit: float, confirm: int) -> list[Alarm]:
    """Return an alarm if generation and training keep to other rates than the plan promised.

    Args:
        drifts: `balance_drift` of consecutive iterations, the present one last; None where it was not measured.
        limit: Relative gap, `replan.drift` of the job, > 0.
        confirm: Iterations in a row, >= 1.
    """
    recent = [value for value in drifts[-confirm:] if value is not None and value > log(1.0 + limit)]
    if len(recent) < confirm:
        return []
    sentence = (
        f"the balance of generation and training is off the plan's promise by a factor of {exp(recent[-1]):.2f} and "
        f"has been by more than {1.0 + limit:g} for {confirm} iterations in a row; if no other plan follows, none "
        "gains enough (`replan.min_gain`): `motley calibrate` corrects the cost model"
    )
    return [Alarm(DRIFT, sentence)]


def drifts_of(records: Sequence[IterationRecord | None], now: float | None) -> list[float | None]:
    """Return the drift of earlier records and the present one, for `drift_alarms`."""
    return [*(None if record is None else record.metrics.get(DRIFT_METRIC) for record in records), now]


def disk_alarms(folders: Mapping[str, Path]) -> list[Alarm]:
    """Return an alarm for every disk that has less room left than the deployment's settings want, each disk once.

    Args:
        folders: Local folders by what they hold, for the sentence.
    """
    try:
        least = read_settings(os.environ).alerts.min_free_gb
    except ContractError as error:
        return [Alarm(SETTINGS, str(error))]
    found: dict[int, Alarm] = {}
    for what, folder in folders.items():
        there = next((place for place in (folder, *folder.parents) if place.exists()), None)
        if there is None or (free := shutil.disk_usage(there).free / 1e9) >= least:
            continue
        sentence = (
            f"{what}, {folder}, has {free:.2f} GB left, less than the {least:g} GB that the deployment wants "
            "(alerts.min_free_gb); lower storage.keep_policies or keep_checkpoints, remove old runs, or free space"
        )
        found.setdefault(there.stat().st_dev, Alarm(DISK, sentence))
    return list(found.values())
