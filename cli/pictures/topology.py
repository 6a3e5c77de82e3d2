"""A picture of a plan on its cluster: regions, machines, GPUs with their tasks, the links that the plan uses."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from cli.pictures.canvas import new_figure
from cli.pictures.gantt import COLOURS
from plans.plan import Plan
from plans.spec.cluster import Cluster, ClusterView
from plans.units import BITS_PER_BYTE, BITS_PER_GBIT, S_PER_MS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GPUS_PER_ROW = 8
CELL = 1.0
"""Width of a GPU in picture units."""


def draw_topology(cluster: Cluster, plan: Plan, file: Path) -> None:
    """Write the picture; the suffix (.svg, .png or .pdf) chooses the format.

    Each region is a box of machines, each machine a row of GPUs, each GPU a stack of the tasks that it holds. Lines
    between regions carry latency and bandwidth; bold ones join regions that a task spans.

    Raises:
        InputError: matplotlib is not installed, or the suffix is none of these.
    """
    places = _region_places(cluster)
    figure = new_figure(file, (13, 10))
    from matplotlib.patches import Patch

    axes = figure.subplots()
    _draw_links(axes, cluster, plan, places)
    for region, (x, y) in places.items():
        _draw_region(axes, cluster, plan, region, x, y)
    handles = [Patch(color=COLOURS[task.value], label=task.value) for task in plan.tasks]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)))
    seconds = plan.predicted.get("iteration_s")
    shown = f": {seconds:.4g} s per iteration" if isinstance(seconds, int | float) else ""
    figure.suptitle(f"{plan.method} on {cluster.name}{shown}")
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _region_places(cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return the middle of each region: on a circle, large enough that the boxes stay apart."""
    names = cluster.view.region_names
    heights = [_height(cluster, name) for name in names]
    if len(names) == 1:
        return {names[0]: (0.0, 0.0)}
    radius = max(1.3 * (GPUS_PER_ROW + 3) * len(names) / (2 * math.pi), 0.75 * max(heights) + 4.0, 9.0)
    angle = 2 * math.pi / len(names)
    return {
        name: (1.25 * radius * math.cos(math.pi / 2 - index * angle), radius * math.sin(math.pi / 2 - index * angle))
        for index, name in enumerate(names)
    }


def _height(cluster: Cluster, region: str) -> float:
    return sum(1.35 * math.ceil(m.count / GPUS_PER_ROW) + 0.75 for m in cluster.machines if m.region == region) + 1.0


def _draw_region(axes: Axes, cluster: Cluster, plan: Plan, region: str, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    height, width = _height(cluster, region), (GPUS_PER_ROW + 0.6) * CELL
    left, top = x - width / 2, y + height / 2
    box = FancyBboxPatch(
        (left, top - height), width, height, boxstyle="round,pad=0.3", facecolor="#f7f7f7", edgecolor="#888888"
    )
    box.set_zorder(2)
    axes.add_patch(box)
    axes.text(x, top - 0.25, region, ha="center", va="center", weight="bold", fontsize=9, zorder=4)
    line = top - 0.9
    for machine in cluster.machines:
        if machine.region != region:
            continue
        axes.text(left + 0.3, line - 0.1, f"{machine.name}: {machine.count} x {machine.gpu}", fontsize=6, zorder=4)
        for index, gpu in enumerate(machine.gpu_ids):
            row, column = divmod(index, GPUS_PER_ROW)
            _draw_gpu(axes, plan, gpu, left + 0.3 + column * CELL, line - 1.3 - 1.35 * row)
        line -= 1.35 * math.ceil(machine.count / GPUS_PER_ROW) + 0.75


def _draw_gpu(axes: Axes, plan: Plan, gpu: str, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    held = [task for task, entry in plan.tasks.items() if gpu in entry.gpus]
    size = 0.88 * CELL
    axes.add_patch(Rectangle((x, y), size, size, facecolor="white", edgecolor="#666666", linewidth=0.5, zorder=3))
    for index, task in enumerate(held):
        height = size / len(held)
        axes.add_patch(
            Rectangle((x, y + index * height), size, height, facecolor=COLOURS[task.value], linewidth=0, zorder=3)
        )


def _draw_links(axes: Axes, cluster: Cluster, plan: Plan, places: dict[str, tuple[float, float]]) -> None:
    view = cluster.view
    spanned = _spanned_regions(view, plan)
    for a, b in combinations(range(len(view.region_names)), 2):
        first, second = int((view.region_of_machine == a).argmax()), int((view.region_of_machine == b).argmax())
        latency, rate = view.machine_latency_s[first, second], view.machine_bytes_per_s[first, second]
        if not math.isfinite(latency):
            continue
        (xa, ya), (xb, yb) = places[view.region_names[a]], places[view.region_names[b]]
        is_used = (a, b) in spanned
        axes.plot(
            [xa, xb], [ya, yb], color="#555555" if is_used else "#dddddd", linewidth=2.0 if is_used else 0.7, zorder=1
        )
        if is_used:
            label = f"{latency / S_PER_MS:.3g} ms, {rate * BITS_PER_BYTE / BITS_PER_GBIT:.3g} Gbps"
            axes.text(
                0.5 * (xa + xb), 0.5 * (ya + yb), label, fontsize=6, ha="center", zorder=1.5, backgroundcolor="white"
            )


def _spanned_regions(view: ClusterView, plan: Plan) -> set[tuple[int, int]]:
    """Return the pairs of regions between which a task, or the weights, travel."""
    used = [{int(view.region_of[view.gpu_index[gpu]]) for gpu in entry.gpus} for entry in plan.tasks.values()]
    actor = {
        int(view.region_of[view.gpu_index[gpu]])
        for task, entry in plan.tasks.items()
        if task.role == "actor"
        for gpu in entry.gpus
    }
    return {pair for regions in (*used, actor) for pair in combinations(sorted(regions), 2)}
