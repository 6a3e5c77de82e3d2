"""What all pictures share: the file's format, matplotlib, and output that is the same for the same input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cli.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
"""Formats, by the file's suffix."""


def new_figure(file: Path, size: tuple[float, float]) -> Figure:
    """Return an empty figure for a file.

    Args:
        file: Where it will be written; the suffix chooses the format.
        size: Width and height, inches.

    Raises:
        InputError: matplotlib is not installed, or the suffix is none of `SUFFIXES`.
    """
    if file.suffix not in SUFFIXES:
        raise InputError(f"{file} is no picture name: use the suffix .svg, .png or .pdf.")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("A picture needs matplotlib, which is not installed; install motley[planner].") from error
    mpl.rcParams["svg.hashsalt"] = "motley"
    return Figure(figsize=size, layout="constrained")
