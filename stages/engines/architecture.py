"""What config.json of a model directory says about the architecture, and whether two of them are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from stages.errors import EngineError

_UNRELATED_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys that don't change the arithmetic of an engine which has its own dtype and is told its end tokens."""


def read_architecture(directory: Path) -> dict[str, JsonValue]:
    """Return the settings of config.json that matter to an engine; `EngineError` when there are none."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise unfit_directory(directory, "it has no config.json") from error
    except (OSError, ValueError) as error:
        raise unfit_directory(directory, f"config.json can't be read: {error}") from error
    if not isinstance(config, dict):
        raise unfit_directory(directory, "config.json is not an object")
    return {key: value for key, value in config.items() if key not in _UNRELATED_KEYS}


def architecture_differences(held: Mapping[str, JsonValue], other: Mapping[str, JsonValue]) -> list[str]:
    """Return what differs, one phrase per setting; settings that only one of the two spells out don't count."""
    shared = sorted(set(held) & set(other))
    return [f"{key} is {other[key]} instead of {held[key]}" for key in shared if held[key] != other[key]]


def require_same_architecture(directory: Path, held: Mapping[str, JsonValue]) -> None:
    """Raise `EngineError` when a directory's model is not of the architecture that an engine holds."""
    differences = architecture_differences(held, read_architecture(directory))
    if differences:
        raise unfit_directory(directory, f"another architecture: {'; '.join(differences)}")


def unfit_directory(directory: Path, reason: str) -> EngineError:
    """Return the error for a model directory that an engine can't take."""
    return EngineError(
        f"{directory} can't be loaded: {reason}. The engine was left as it was; give it a complete model directory "
        "(config.json and safetensors) of the same architecture",
        directory=str(directory),
        reason=reason,
    )
