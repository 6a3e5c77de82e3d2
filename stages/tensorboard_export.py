"""Scalars as TensorBoard event files, one file per iteration, when the package is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path


def write_scalars(folder: Path, iteration: int, scalars: Mapping[str, float]) -> bool:
    """Write one iteration's scalars; a repeated call replaces them. Returns whether TensorBoard is installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return False
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    suffix = f".iteration-{iteration:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"*{suffix}"):
        old.unlink()
    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    values = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(scalars.items())]
    writer.add_event(Event(step=iteration, summary=Summary(value=values)))
    writer.close()
    return True
