"""What all pictures share: the file's format, matplotlib, and output that is the same for the same input."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cli.documents import require_place
from cli.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
"""Formats, by the file's suffix."""


def require_picture(file: Path) -> None:
    """Refuse a picture that can't be drawn, before the work that it is to show.

    Raises:
        InputError: matplotlib is not installed, the suffix is none of `SUFFIXES`, or the file can't be written.
    """
    if file.suffix not in SUFFIXES:
        raise InputError(f"{file} is no picture name: use the suffix .svg, .png or .pdf.")
    if find_spec("matplotlib") is None:
        raise InputError("A picture needs matplotlib, which is not installed; install motley[planner].")
    require_place(file)


def new_figure(file: Path, size: tuple[float, float]) -> Figure:
    """Return an empty figure for a file.

    Args:
        file: Where it will be written; the suffix chooses the format.
        size: Width and height, inches.

    Raises:
        InputError: as `require_picture`.
    """
    require_picture(file)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "motley"
    return Figure(figsize=size, layout="constrained")
