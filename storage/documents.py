"""JSON documents in the store: canonical bytes, and refusals that name file, field, value and rule."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from storage.errors import AlreadyPublishedError, CorruptObjectError, InvalidInputError, SchemaVersionError
from storage.store import Store

Model = TypeVar("Model", bound=BaseModel)


def json_bytes(value: object, what: str = "document") -> bytes:
    """Return canonical JSON: sorted keys, indented, one trailing newline.

    Args:
        value: JSON-able value.
        what: What it is, for the message.

    Raises:
        InvalidInputError: Not JSON-able, or a number in it is NaN or infinite.
    """
    try:
        return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        path = _first_fault(value, "")
        message = f"{what}: field {path or '/'} cannot be stored as JSON ({error}); use finite numbers, text, lists"
        raise InvalidInputError(message) from error


def fingerprint(*parts: object) -> str:
    """Return the SHA-256 (hex) of JSON-able values: equal inputs give equal fingerprints on every machine."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_json(data: bytes, key: str, url: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CorruptObjectError: Empty, torn, not an object, or holding a non-finite number.
    """
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except ValueError as error:
        message = (
            f"{url}/{key} is no complete JSON document ({len(data)} bytes: {error}); repeat the stage that wrote it"
        )
        raise CorruptObjectError(message, key=key) from error
    if not isinstance(value, dict):
        message = f"{url}/{key} holds a JSON {type(value).__name__}, but an object is needed"
        raise CorruptObjectError(message, key=key)
    return value


def check_format(document: Mapping[str, Any], expected: str, key: str, url: str) -> None:
    """Refuse a document of another kind or of a newer version.

    Args:
        document: Parsed document.
        expected: E.g. ``motley.manifest/1``.
        key: Its key, for the message.
        url: Root of the store, for the message.

    Raises:
        SchemaVersionError: Same kind, newer version.
        CorruptObjectError: Another kind or no ``format``.
    """
    found = document.get("format")
    if found == expected:
        return
    kind, _, version = expected.rpartition("/")
    found_kind, _, found_version = str(found).rpartition("/")
    if found_kind == kind and found_version.isdecimal() and int(found_version) > int(version):
        message = f"{url}/{key}: format is {found!r}, newer than {expected!r} of this code; update Motley"
        raise SchemaVersionError(message, key=key)
    message = f"{url}/{key}: field format is {found!r}, but only {expected!r} is allowed here"
    raise CorruptObjectError(message, key=key)


def read_model(store: Store, key: str, model: type[Model], expected_format: str) -> Model:
    """Read a document as a pydantic model.

    Raises:
        ObjectMissingError: There is none.
        CorruptObjectError: It is torn, of another kind, or breaks the model; all faults are named.
        SchemaVersionError: It is newer than this code.
    """
    document = parse_json(store.read_bytes(key), key, store.url)
    check_format(document, expected_format, key, store.url)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        message = f"{store.url}/{key}: {faults_text(error)}"
        raise CorruptObjectError(message, key=key) from error


def model_bytes(model: BaseModel, what: str) -> bytes:
    """Return the canonical JSON of a pydantic model.

    Raises:
        InvalidInputError: A number in it is NaN or infinite (pydantic alone would write null for it).
    """
    if (path := _first_fault(model.model_dump(), "", is_number_only=True)) is not None:
        message = f"{what}: field {path} is not a finite number; leave it out or store null on purpose"
        raise InvalidInputError(message)
    return json_bytes(model.model_dump(mode="json"), what)


def publish_once(store: Store, key: str, data: bytes, what: str) -> None:
    """Publish a document that never changes; the same content again is success.

    Raises:
        AlreadyPublishedError: Other content lies there.
    """
    if store.create(key, data):
        return
    if store.read_bytes(key) != data:
        message = f"{store.url}/{key}: another {what} is already committed there; use the next number"
        raise AlreadyPublishedError(message, key=key)


def faults_text(error: ValidationError) -> str:
    """Return all faults of a pydantic validation in one line: field path, what was found, what is allowed."""
    return "; ".join(
        f"field {'/'.join(str(part) for part in fault['loc']) or '/'} is {fault['input']!r:.80}: {fault['msg']}"
        for fault in error.errors()
    )


def _refuse_constant(text: str) -> float:
    message = f"{text} is not a finite number"
    raise ValueError(message)


def _first_fault(value: object, path: str, *, is_number_only: bool = False) -> str | None:
    """Return the path of the first value that JSON cannot hold, or of the first number that is not finite."""
    inner: Iterable[tuple[object, object]] | None = None
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    if inner is not None:
        found = (_first_fault(item, f"{path}/{name}", is_number_only=is_number_only) for name, item in inner)
        return next((fault for fault in found if fault), None)
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    return None if is_number_only or value is None or isinstance(value, str | int | bool) else path
