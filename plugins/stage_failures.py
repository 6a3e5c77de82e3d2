"""A stage's error record back to the exception that the stage raised."""

from __future__ import annotations

import importlib
from typing import Final

from plans.errors import PlanningError
from stages.contract import StageFailure
from stages.errors import EngineUnavailableError, StageError
from storage.errors import StorageError

_MODULES: Final = ("stages.errors", "storage.errors", "plans.errors")
"""Modules from which classes are rebuilt; anything else that a record names is never imported."""

_ROOTS: Final = (StageError, StorageError, PlanningError)


def error_of(failure: StageFailure) -> Exception:
    """Return an exception of the recorded class with the recorded message and attributes.

    A class that is none of Motley's becomes `EngineUnavailableError` where the stage said that another attempt can
    succeed (it was ended from outside), else `StageError`.
    """
    module, _, name = failure.type.rpartition(".")
    found = getattr(importlib.import_module(module), name, None) if module in _MODULES else None
    if isinstance(found, type) and issubclass(found, _ROOTS):
        # Constructors differ (some build the message from facts); the record has the finished message.
        error = found.__new__(found)
        error.args = (failure.message,)
        error.__dict__.update(failure.attributes, attributes=dict(failure.attributes))
        return error
    kind = EngineUnavailableError if failure.is_retryable else StageError
    return kind(f"{failure.type}: {failure.message}", type=failure.type)
