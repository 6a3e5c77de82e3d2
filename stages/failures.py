"""Errors that cross from a child process of a stage to the stage: a JSON file with class, message and attributes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import stages.errors
from stages.errors import SpecFaultsError, StageError


def record_failure(path: Path, error: Exception) -> None:
    """Leave an error for the parent process."""
    attributes = dict(error.attributes) if isinstance(error, StageError) else {}
    document = {"type": type(error).__name__, "message": str(error), "attributes": attributes}
    path.write_text(json.dumps(document, default=str), encoding="utf-8")


def raise_recorded_failure(path: Path, what: str) -> NoReturn:
    """Raise the error that a child process left; a `StageError` that says `what` failed where it left none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise StageError(f"{what} failed without a message; its log has the reason.") from None
    kind = getattr(stages.errors, str(document["type"]), None)
    attributes = document["attributes"]
    if kind is SpecFaultsError and isinstance(attributes.get("faults"), list):
        raise SpecFaultsError(str(attributes.get("source")), attributes["faults"])
    if isinstance(kind, type) and issubclass(kind, StageError) and kind is not SpecFaultsError:
        raise kind(document["message"], **attributes)
    raise StageError(f"{what} failed: {document['type']}: {document['message']}")
