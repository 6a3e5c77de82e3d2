"""A cluster as inline SVG: regions with their machines and GPUs, what each GPU does, and the links between regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

from plans.cost.report import GpuMemory
from plans.plan import Plan
from plans.spec.cluster import Cluster, Machine

WIDTH: Final = 860
_CELL, _GAP, _PER_ROW, _PAD, _HEAD = 15, 3, 8, 10, 34
_MACHINE_WIDTH: Final = _PER_ROW * (_CELL + _GAP) + 2 * _PAD
_PER_LINE: Final = (WIDTH - 20) // (_MACHINE_WIDTH + _PAD)


@dataclass(frozen=True, slots=True)
class GpuRole:
    """What one GPU does in a plan."""

    group: int
    """Index of its group in the plan."""
    tasks: tuple[str, ...]
    """Tasks that it holds a part of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRow:
    """A link between two regions, or inside one."""

    between: str
    """The two places."""
    latency_ms: float | None
    """One-way latency; None where a connection is forbidden."""
    bandwidth_gbps: float | None
    """Bandwidth of one direction, 1e9 bits/s; None where a connection is forbidden."""


def roles_of(plan: Plan) -> dict[str, GpuRole]:
    """Return what each GPU of a plan does, by GPU id."""
    tasks: dict[str, list[str]] = {}
    for task, placed in plan.tasks.items():
        for gpu in placed.gpus:
            tasks.setdefault(gpu, []).append(task.value)
    group_of = {gpu: index for index, group in enumerate(plan.groups) for gpu in group.gpus}
    return {gpu: GpuRole(group_of.get(gpu, 0), tuple(names)) for gpu, names in tasks.items()}


def link_rows(cluster: Cluster) -> list[LinkRow]:
    """Return the links of a cluster: inside zones and regions, between regions, and the exceptions."""
    rows = []
    for name, rate in (("machines of a zone", cluster.links.same_zone), ("zones", cluster.links.same_region)):
        if rate is not None:
            rows.append(LinkRow(between=name, latency_ms=rate.latency_ms, bandwidth_gbps=rate.bandwidth_gbps))
    rows += [
        LinkRow(between=" and ".join(link.between), latency_ms=link.latency_ms, bandwidth_gbps=link.bandwidth_gbps)
        for link in (*cluster.links.regions, *cluster.links.machines)
    ]
    return rows


def cluster_map(cluster: Cluster, roles: Mapping[str, GpuRole]) -> Markup:
    """Return the picture of a cluster; GPUs without a role are drawn empty."""
    regions: dict[str, list[Machine]] = {}
    for machine in cluster.machines:
        regions.setdefault(machine.region, []).append(machine)
    parts: list[str] = []
    y = 4.0
    for region, machines in regions.items():
        drawn, height = _region(region, machines, roles, y)
        parts += drawn
        y += height + _PAD
    said = "; ".join(f"{name}: {', '.join(m.name for m in machines)}" for name, machines in regions.items())
    return Markup(
        f'<svg class="map" viewBox="0 0 {WIDTH} {y:.0f}" role="img" aria-label="Machines by region. {escape(said)}">'
        f"{''.join(parts)}</svg>"
    )


def memory_bars(memory: Mapping[str, GpuMemory]) -> Markup:
    """Return one bar per GPU: resident models, largest working set, capacity."""
    lane, left, width = 18, 120, 560
    largest = max((entry.capacity_gb for entry in memory.values()), default=1.0)
    largest = max([largest, *(entry.model_gb + entry.working_gb for entry in memory.values())])
    parts = []
    for index, (gpu, entry) in enumerate(memory.items()):
        y, scale = 4 + index * lane, width / largest
        model, working = entry.model_gb * scale, entry.working_gb * scale
        used = entry.model_gb + entry.working_gb
        said = f"{used:.3g} of {entry.capacity_gb:.3g} GB ({used / entry.capacity_gb:.0%})"
        parts.append(
            f'<text class="lane" x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(gpu)}</text>'
            f'<rect class="capacity" x="{left}" y="{y + 2}" width="{entry.capacity_gb * scale:.1f}" height="12"/>'
            f'<rect class="bar model" x="{left}" y="{y + 2}" width="{model:.1f}" height="12">'
            f"<title>models {entry.model_gb:.3g} GB</title></rect>"
            f'<rect class="bar working" x="{left + model:.1f}" y="{y + 2}" width="{working:.1f}" height="12">'
            f"<title>working set {entry.working_gb:.3g} GB</title></rect>"
            f'<text class="amount" x="{left + width + 8}" y="{y + 12}">{said}</text>'
        )
    height = 8 + lane * len(memory)
    return Markup(
        f'<svg class="memory" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Memory by GPU; the table below has '
        f'the numbers">{"".join(parts)}</svg>'
    )


def _region(
    region: str, machines: Sequence[Machine], roles: Mapping[str, GpuRole], y: float
) -> tuple[list[str], float]:
    """Return a region's box with its machines, and its height."""
    rows = [machines[i : i + _PER_LINE] for i in range(0, len(machines), _PER_LINE)]
    parts: list[str] = []
    inner = y + 22.0
    for row in rows:
        heights = [_machine_height(machine) for machine in row]
        for place, machine in enumerate(row):
            parts += _machine(machine, roles, 14 + place * (_MACHINE_WIDTH + _PAD), inner, max(heights))
        inner += max(heights) + _PAD
    height = inner - y
    box = f'<rect class="region" x="4" y="{y:.0f}" width="{WIDTH - 8}" height="{height:.0f}" rx="4"/>'
    name = f'<text class="name" x="14" y="{y + 16:.0f}">{escape(region)}</text>'
    return [box, name, *parts], height


def _machine_height(machine: Machine) -> int:
    return _HEAD + -(-machine.count // _PER_ROW) * (_CELL + _GAP) + _PAD


def _machine(machine: Machine, roles: Mapping[str, GpuRole], x: float, y: float, height: int) -> Iterator[str]:
    yield (
        f'<rect class="machine" x="{x:.0f}" y="{y:.0f}" width="{_MACHINE_WIDTH}" height="{height}" rx="3"/>'
        f'<text class="name" x="{x + _PAD:.0f}" y="{y + 15:.0f}">{escape(machine.name)}</text>'
        f'<text class="tick" x="{x + _PAD:.0f}" y="{y + 28:.0f}">{machine.count} x {escape(machine.gpu)}</text>'
    )
    for index, gpu in enumerate(machine.gpu_ids):
        role = roles.get(gpu)
        row, column = divmod(index, _PER_ROW)
        left, top = x + _PAD + column * (_CELL + _GAP), y + _HEAD + row * (_CELL + _GAP)
        kind = "idle" if role is None else f"g{role.group % 6}"
        said = "no work" if role is None else ", ".join(role.tasks)
        yield (
            f'<rect class="gpu {kind}" x="{left:.0f}" y="{top:.0f}" width="{_CELL}" height="{_CELL}" rx="2">'
            f"<title>{escape(gpu)}: {escape(said)}</title></rect>"
        )
