"""Level 3 of the search: which GPUs a group gets, grown along near machines (extension of HetRL's random start)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plans.search.groupings import Grouping
from plans.search.problem import Problem
from plans.search.seeds import Draws
from plans.workflow import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthStyle:
    """How groups choose machines."""

    first: TaskKind | None
    """Groups with a task of this kind choose first; None = random order."""
    noise: float
    """Relative noise on the preferences; 0 = none."""
    reverse: bool = False
    """Later groups before earlier ones, among those that choose at the same time."""


#: Styles without randomness, tried first.
PLAIN_STYLES = (
    GrowthStyle(first=TaskKind.TRAINING, noise=0.0),
    GrowthStyle(first=TaskKind.TRAINING, noise=0.0, reverse=True),
    GrowthStyle(first=TaskKind.GENERATION, noise=0.0),
)
RANDOM_STYLE = GrowthStyle(first=None, noise=0.35)


def grow_groups(
    problem: Problem, grouping: Grouping, sizes: Sequence[int], style: GrowthStyle, rng: Draws
) -> tuple[tuple[int, ...], ...]:
    """Return GPU indices per group: its favourite machine, then the nearest ones, whole if possible."""
    order = problem.order
    free: list[list[int]] = [[] for _ in problem.view.machine_names]
    for gpu, machine in enumerate(problem.machine_of):
        free[machine].append(gpu)
    taken: list[tuple[int, ...]] = [()] * len(grouping)
    for group in _turns(grouping, style, rng):
        preference = order.hbm if _likes_bandwidth(grouping, group, style, rng) else order.compute
        noise = style.noise * np.array(rng.normals(len(preference))) if style.noise else 0.0
        liking = preference * np.exp(noise)
        taken[group] = _take(free, sizes[group], (liking / float(liking.max())).tolist(), order.reach_s)
    return tuple(taken)


def _turns(grouping: Grouping, style: GrowthStyle, rng: Draws) -> list[int]:
    if style.first is None:
        return rng.permutation(len(grouping))
    sign = -1 if style.reverse else 1
    return sorted(range(len(grouping)), key=lambda g: (all(t.kind is not style.first for t in grouping[g]), sign * g))


def _likes_bandwidth(grouping: Grouping, group: int, style: GrowthStyle, rng: Draws) -> bool:
    """Tell whether a group takes memory bandwidth over FLOP/s: decoding does; where it has company, styles differ."""
    kinds = {task.kind for task in grouping[group]}
    if TaskKind.GENERATION not in kinds or len(kinds) == 1:
        return TaskKind.GENERATION in kinds
    return rng.random() < 0.5 if style.first is None else style.first is TaskKind.GENERATION


def _take(
    free: list[list[int]], size: int, liking: Sequence[float], reach_s: Sequence[Sequence[float]]
) -> tuple[int, ...]:
    """Take `size` GPUs from the free ones: favourite machine first, then by distance to the machines taken."""
    chosen: list[int] = []
    reach = [0.0] * len(free)
    while len(chosen) < size:
        need = size - len(chosen)
        open_machines = [m for m, gpus in enumerate(free) if gpus]
        machine = min(open_machines, key=lambda m: (reach[m], -liking[m] * _fit(len(free[m]), need), m))
        chosen += free[machine][:need]
        free[machine] = free[machine][need:]
        reach = list(map(max, reach, reach_s[machine]))
        reach[machine] = 0.0
    return tuple(sorted(chosen))


def _fit(available: int, need: int) -> float:
    """Prefer machines that are used up by the need: what is left of a broken machine serves nobody well."""
    return 1.0 if available <= need else 0.5 + 0.5 * need / available
