"""Model directories in Hugging Face format, checked before an engine lets them near its weights.

Safetensors headers are parsed by the safetensors library, which also compares each file's length with what its header
promises, so a truncated file is found without reading the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from stages.engines.architecture import unfit_directory

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor shapes by name."""

_INDEX_NAME = "model.safetensors.index.json"
_MAX_LISTED_NAMES = 5


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory, by its index where it has one; all of them exist."""
    index = directory / _INDEX_NAME
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise unfit_directory(directory, f"{_INDEX_NAME} can't be read: {error}") from error
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise unfit_directory(directory, f"missing files: {', '.join(missing) or '*.safetensors'}")
    return files


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a model directory, from the headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="numpy") as tensors:
                shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.offset_keys()})
        except (SafetensorError, OSError) as error:
            raise unfit_directory(directory, f"{file.name} is no complete safetensors file: {error}") from error
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
        raise unfit_directory(directory, "; ".join(faults))


def _listing(names: list[str]) -> str:
    rest = len(names) - _MAX_LISTED_NAMES
    return ", ".join(names[:_MAX_LISTED_NAMES]) + (f" and {rest} more" if rest > 0 else "")
