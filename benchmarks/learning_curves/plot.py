"""The picture of a study: training reward over iterations, and each of its columns; one line per run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.learning_curves.studies import Study


def draw(study: Study, runs: list[dict[str, Any]], file: Path) -> None:
    """Write the picture as PNG."""
    from matplotlib.figure import Figure

    names = ("reward_mean", *study.columns)
    figure = Figure(figsize=(3.6 * len(names), 3.2), layout="constrained")
    arms = [arm.name for arm in study.arms]
    for axes, name in zip(figure.subplots(1, len(names)), names, strict=True):
        for run in runs:
            points = [(k, record[name]) for k, record in enumerate(run["records"]) if name in record]
            label = run["arm"] if run["seed"] == runs[0]["seed"] else None
            axes.plot(*zip(*points, strict=True), color=f"C{arms.index(run['arm'])}", alpha=0.7, label=label)
        axes.set(xlabel="iteration", title=name)
    figure.axes[0].legend()
    figure.savefig(file, dpi=110)
