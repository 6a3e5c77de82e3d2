"""Errors that cross from a child process of a stage to the stage: a JSON file with class, message and attributes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import stages.errors
from stages.errors import SpecFaultsError, StageError


def record_failure(path: Path, error: Exception) -> None:
    """Leave an error for the parent process."""
    path.write_text(json.dumps(failure_record(error)), encoding="utf-8")


def raise_recorded_failure(path: Path, what: str) -> NoReturn:
    """Raise the error that a child process left; a `StageError` that says `what` failed where it left none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise StageError(f"{what} failed without a message; its log has the reason.") from None
    if _class_of(document) is None:
        raise StageError(f"{what} failed: {document['type']}: {document['message']}")
    raise recorded_error(document)


def recorded_error(document: Mapping[str, Any], **attributes: Any) -> StageError:  # noqa: ANN401 - facts of any type
    """Return the error of a record; a `StageError` where its class is none of the stages' own.

    Args:
        document: Class name, message and attributes.
        **attributes: Facts to add.
    """
    facts = {**document["attributes"], **attributes}
    kind = _class_of(document) or StageError
    if kind is SpecFaultsError:
        return SpecFaultsError(str(facts.get("source")), facts["faults"])
    return kind(str(document["message"]), **facts)


def failure_record(error: BaseException) -> dict[str, Any]:
    """Return class, message and attributes of an error as JSON has them."""
    attributes = dict(error.attributes) if isinstance(error, StageError) else {}
    document = {"type": type(error).__name__, "message": str(error), "attributes": attributes}
    plain: dict[str, Any] = json.loads(json.dumps(document, default=str))
    return plain


def _class_of(document: Mapping[str, Any]) -> type[StageError] | None:
    kind = getattr(stages.errors, str(document["type"]), None)
    if not (isinstance(kind, type) and issubclass(kind, StageError)):
        return None
    is_complete = kind is not SpecFaultsError or isinstance(document["attributes"].get("faults"), list)
    return kind if is_complete else None
