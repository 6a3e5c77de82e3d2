"""A Gantt picture of a simulation: one row per GPU, one colour per activity."""

from __future__ import annotations

from pathlib import Path

from cli.pictures.canvas import new_figure
from plans.simulate import SimulationResult
from plans.spec.cluster import Cluster

COLOURS = {
    "actor_generation": "#4477aa",
    "reference_inference": "#66ccee",
    "reward_inference": "#228833",
    "critic_inference": "#ccbb44",
    "actor_training": "#ee6677",
    "critic_training": "#aa3377",
}
"""A palette that stays apart for colour-blind readers (Paul Tol, bright)."""

MAX_ROWS = 128
"""GPUs drawn; of a larger cluster the first of each machine stands for the others."""


def draw_gantt(result: SimulationResult, cluster: Cluster, file: Path) -> None:
    """Write the picture; the suffix (.svg, .png or .pdf) chooses the format.

    Raises:
        InputError: matplotlib is not installed, or the suffix is none of these.
    """
    gpus = _drawn_gpus(result, cluster)
    row_of = {gpu: row for row, gpu in enumerate(gpus)}
    figure = new_figure(file, (11, 1.6 + 0.16 * len(gpus)))
    from matplotlib.patches import Patch

    axes = figure.subplots()
    for activity, colour in COLOURS.items():
        for interval in (i for i in result.intervals if i.activity == activity and i.gpu in row_of):
            axes.broken_barh(
                [(interval.start_s, interval.end_s - interval.start_s)],
                (row_of[interval.gpu] - 0.42, 0.84),
                facecolors=colour,
                edgecolors="white",
                linewidth=0.3,
            )
    end = 0.0
    for seconds in result.iteration_s:
        end += seconds
        axes.axvline(end, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(gpus)), [cluster.view.gpu_ids[gpu] for gpu in gpus], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("simulated seconds (dotted: a new policy is in place)")
    used = {interval.activity for interval in result.intervals}
    legend = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    figure.legend(handles=legend, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(file, dpi=130)


def _drawn_gpus(result: SimulationResult, cluster: Cluster) -> list[int]:
    used = sorted({interval.gpu for interval in result.intervals})
    if len(used) <= MAX_ROWS:
        return used
    first: dict[int, int] = {}
    for gpu in used:
        first.setdefault(int(cluster.view.machine_of[gpu]), gpu)
    return list(first.values())[:MAX_ROWS]
