"""From an alert to Airflow's notifiers: which ones is the deployment's setting (`stages.settings`), never a job's.

Without a notifier an alert is a line in the log of the task (or triggerer, or DAG processor) and an event of the run.
Nothing here raises: what was to be told must not break what it is about.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseNotifier

from stages.errors import ContractError
from stages.settings import AlertSettings, NotifierSettings, read_settings
from storage.alerts import Alert, read_alert, write_alert
from storage.errors import StorageError
from storage.store import Store

logger = logging.getLogger(__name__)


def deliver(raised: Alert, store: Store, context: Mapping[str, Any]) -> Alert:
    """Tell every notifier of the deployment, unless the matter was told a short while ago; return what became of it.

    Args:
        raised: The alert.
        store: Store of the run, in which the alert is kept.
        context: Airflow's context, for the notifiers' templates; `alert` is added.
    """
    faults: tuple[str, ...] = ()
    try:
        settings = read_settings(os.environ).alerts
    except ContractError as error:
        settings, faults = AlertSettings(), (str(error),)
    if not raised.is_due_after(_last(store, raised), settings.repeat_s):
        logger.info("ALERT %s, told before: %s", raised.kind, raised.sentence)
        return raised
    logger.warning("ALERT %s: %s", raised.kind, raised.sentence)
    said = {item.call: _notify(item, raised, context) for item in settings.notifiers}
    done = raised.model_copy(
        update={
            "delivered_to": tuple(call for call, fault in said.items() if fault is None),
            "faults": (*faults, *(fault for fault in said.values() if fault is not None)),
        }
    )
    for fault in done.faults:
        logger.error("an alert could not be delivered: %s", fault)
    try:
        write_alert(store, done)
    except StorageError as error:
        logger.error("the alert is not kept in %s: %s", store.url, error)  # noqa: TRY400 - the sentence says it all
    return done


def notifier_class(call: str) -> type[BaseNotifier]:
    """Return the class that a setting names.

    Raises:
        ContractError: there is none, or it is no notifier.
    """
    module, _, name = call.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ContractError(
            f"notifier {call} can't be imported ({error}); install its package in Airflow's environment, or correct "
            "alerts.notifiers in the settings."
        ) from error
    if not (isinstance(found, type) and issubclass(found, BaseNotifier)):
        raise ContractError(f"alerts.notifiers names {call}, which is no subclass of airflow.sdk.BaseNotifier.")
    return found


def _last(store: Store, raised: Alert) -> Alert | None:
    try:
        return read_alert(store, raised.run, raised.matter)
    except StorageError as error:
        logger.warning("whether %s was told before is unknown: %s", raised.matter, error)
        return None


def _notify(wanted: NotifierSettings, raised: Alert, context: Mapping[str, Any]) -> str | None:
    """Tell one notifier; return why it failed, None if it did not."""
    try:
        made = notifier_class(wanted.call)(**wanted.arguments)
        made({**context, "alert": raised.facts()})
    except ContractError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever a foreign class raises
        return f"{wanted.call}: {type(error).__name__}: {error}"
    return None
