"""Messages between the client of an engine and its process: MessagePack built from the protocol's own signatures.

Arguments and results of a method are encoded from its annotations in `stages.engines.protocol`, so the protocol is the
only place where they are written down. Errors travel as JSON (class, message, attributes). Nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from stages import errors
from stages.engines.launch import Role
from stages.engines.protocol import CriticEngine, GenerationEngine, RewardEngine, ScoringEngine, TrainingEngine
from stages.errors import ContractError, EngineError, SpecFaultsError, StageError

URGENT_HEADER = "X-Motley-Urgent"
"""Header of a call that interrupts a running `generate`; its value is 1."""

PROTOCOLS: Mapping[Role, type] = {
    "generation": GenerationEngine,
    "scoring": ScoringEngine,
    "training": TrainingEngine,
    "critic": CriticEngine,
    "reward": RewardEngine,
}


class MethodCodec:
    """Encodes and decodes the arguments and the result of one protocol method."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Any],
        result: Any,  # noqa: ANN401 - a type form
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the codec of a method whose parameters have these types and, some of them, defaults."""
        self.name = name
        self._parameters = tuple(parameters)
        known = defaults or {}
        fields = [(field, kind, *((known[field],) if field in known else ())) for field, kind in parameters.items()]
        self._arguments = msgspec.msgpack.Decoder(
            msgspec.defstruct(f"{name}_arguments", fields, forbid_unknown_fields=True),
            dec_hook=_decode_object,
        )
        self._result = msgspec.msgpack.Decoder(result, dec_hook=_decode_object)

    def encode_arguments(self, arguments: Mapping[str, Any]) -> bytes:
        """Return the body of a call."""
        return _ENCODER.encode(arguments)

    def decode_arguments(self, body: bytes) -> dict[str, Any]:
        """Return the keyword arguments of a call; a body of another shape raises `ContractError`."""
        try:
            decoded = self._arguments.decode(body)
        except (msgspec.DecodeError, ValueError) as error:
            raise ContractError(
                f"the arguments of engine method {self.name!r} don't fit its signature: {error}"
            ) from error
        return {name: getattr(decoded, name) for name in self._parameters}

    def encode_result(self, result: object) -> bytes:
        """Return the body of an answer."""
        return _ENCODER.encode(result)

    def decode_result(self, body: bytes) -> Any:  # noqa: ANN401 - of the method
        """Return a result; a body of another shape raises `ContractError`."""
        try:
            return self._result.decode(body)
        except (msgspec.DecodeError, ValueError) as error:
            raise ContractError(
                f"the result of engine method {self.name!r} doesn't fit its signature: {error}"
            ) from error


@functools.cache
def methods_of(role: Role) -> Mapping[str, MethodCodec]:
    """Return the codec of each method that an engine of `role` offers over the wire (all but `close`)."""
    protocol = PROTOCOLS[role]
    functions = {
        name: member
        for name, member in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_") and name != "close"
    }
    codecs: dict[str, MethodCodec] = {}
    for name, function in functions.items():
        hints = typing.get_type_hints(function)
        result = hints.pop("return")
        signature = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in signature if p.default is not inspect.Parameter.empty}
        codecs[name] = MethodCodec(name, hints, result, defaults)
    return codecs


class WireError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `StageError` on its way to another process."""

    type: str
    """Class name within `stages.errors`."""
    message: str
    attributes: dict[str, Any]


def encode_error(error: StageError) -> bytes:
    """Return the JSON form of an error; attributes that JSON doesn't know become their `str`."""
    kind = next(cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    return msgspec.json.encode(WireError(kind, str(error), dict(error.attributes)), enc_hook=_encode_attribute)


def decode_error(body: bytes) -> StageError:
    """Return the error that `encode_error` wrote, of the same class; anything else raises `ContractError`."""
    try:
        wire = msgspec.json.decode(body, type=WireError)
    except (msgspec.DecodeError, ValueError) as error:
        raise ContractError(f"not an engine error: {body[:200]!r}: {error}") from error
    kind = getattr(errors, wire.type, EngineError)
    if kind is SpecFaultsError:
        return SpecFaultsError(str(wire.attributes["source"]), list(wire.attributes["faults"]))
    return typing.cast("StageError", kind(wire.message, **wire.attributes))


def _encode_object(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if hasattr(value, "tolist"):  # numpy arrays and scalars, as readers of columns hold them
        return value.tolist()
    raise TypeError(f"engine messages can't carry a {type(value).__name__}")


def _decode_object(kind: type, value: object) -> object:
    if issubclass(kind, Path):
        return kind(str(value))
    if issubclass(kind, BaseModel):
        return kind.model_validate(value)
    raise TypeError(f"engine messages can't carry a {kind.__name__}")


def _encode_attribute(value: object) -> object:
    return str(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_object)
