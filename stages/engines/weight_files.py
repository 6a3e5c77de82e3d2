"""Model directories in Hugging Face format, checked before an engine lets them near its weights.

Safetensors headers are parsed by the safetensors library, which also compares each file's length with what its header
promises, so a truncated file is found without reading the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stages.errors import EngineError

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor shapes by name."""

_INDEX_NAME = "model.safetensors.index.json"
_UNRELATED_CONFIG_KEYS = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Keys of config.json that change neither architecture nor arithmetic of an engine with its own dtype."""
_MAX_LISTED_NAMES = 5


def read_config(directory: Path) -> dict[str, Any]:
    """Return the parsed config.json of a model directory; `EngineError` when there is none."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise _unfit(directory, "it has no config.json") from error
    except (OSError, ValueError) as error:
        raise _unfit(directory, f"config.json can't be read: {error}") from error
    if not isinstance(config, dict):
        raise _unfit(directory, "config.json is not an object")
    return config


def model_fingerprint(directory: Path) -> str:
    """Return a SHA-256 of what config.json says about the architecture."""
    config = {key: value for key, value in read_config(directory).items() if key not in _UNRELATED_CONFIG_KEYS}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory, by its index where it has one; all of them exist."""
    index = directory / _INDEX_NAME
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise _unfit(directory, f"{_INDEX_NAME} can't be read: {error}") from error
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise _unfit(directory, f"missing files: {', '.join(missing) or '*.safetensors'}")
    return files


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a model directory, from the headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="numpy") as tensors:
                shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise _unfit(directory, f"{file.name} is no complete safetensors file: {error}") from error
    return shapes


def validate_weights(directory: Path, expected: Shapes, optional: Iterable[str] = ()) -> None:
    """Raise `EngineError`, with all faults, unless a directory has just the expected tensors.

    Args:
        directory: Model directory.
        expected: Shapes by name that the engine holds.
        optional: Names that may be absent, e.g. an output head tied to the embedding.
    """
    found = read_shapes(directory)
    missing = sorted(set(expected) - set(found) - set(optional))
    unknown = sorted(set(found) - set(expected))
    reshaped = sorted(name for name in set(found) & set(expected) if found[name] != tuple(expected[name]))
    faults = [
        f"{label}: {_listing(names)}"
        for label, names in (
            ("missing tensors", missing),
            ("unknown tensors", unknown),
            ("other shapes", [f"{name} {found[name]} instead of {tuple(expected[name])}" for name in reshaped]),
        )
        if names
    ]
    if faults:
        raise _unfit(directory, "; ".join(faults))


def _listing(names: list[str]) -> str:
    rest = len(names) - _MAX_LISTED_NAMES
    return ", ".join(names[:_MAX_LISTED_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _unfit(directory: Path, reason: str) -> EngineError:
    return EngineError(
        f"{directory} can't be loaded: {reason}. The engine was left as it was; give it a complete model directory "
        "(config.json and safetensors) of the same architecture",
        directory=str(directory),
        reason=reason,
    )
