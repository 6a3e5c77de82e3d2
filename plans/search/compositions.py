"""Level 2 of the search: how many GPUs each group gets, kept bounded (reconstruction, hetrl.md 6 "Arm explosion").

Sizes are multiples of a unit, compositions that cannot hold the models are dropped, and each grouping keeps at most
`cap` of them: the one proportional to the groups' work always, the others drawn evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np

Composition = tuple[int, ...]

#: Draws per wanted composition before sampling gives up (small or tightly bounded spaces have few members).
_DRAWS_PER_COMPOSITION = 8


def proportional_composition(weights: Sequence[float], minimum: Sequence[int], total: int) -> Composition | None:
    """Return sizes proportional to `weights` with given minima that add up to `total`; None if the minima exceed it.

    Args:
        weights: positive work per group.
        minimum: least GPUs per group, each >= 1.
        total: GPUs to share out.
    """
    if sum(minimum) > total:
        return None
    scale = total / sum(weights)
    sizes = [max(low, math.floor(weight * scale)) for weight, low in zip(weights, minimum, strict=True)]
    while sum(sizes) > total:
        _change(sizes, weights, minimum, -1)
    while sum(sizes) < total:
        _change(sizes, weights, minimum, +1)
    return tuple(sizes)


def compositions(
    weights: Sequence[float],
    minimum: Sequence[int],
    total: int,
    *,
    unit: int,
    cap: int,
    rng: np.random.Generator,
    machine: int = 1,
) -> tuple[Composition, ...]:
    """Return at most `cap` compositions of `total` GPUs over the groups, the proportional one first.

    The second is the proportional one in whole machines of `machine` GPUs, where there are enough of them.
    Sizes are multiples of `unit`; what is left of `total` goes to the group with the most work. Groups whose minimum
    exceeds their size make a composition inadmissible.
    """
    first = proportional_composition(weights, minimum, total)
    if first is None:
        return ()
    heaviest = max(range(len(weights)), key=lambda index: weights[index])
    units, rest = divmod(total, unit)
    chosen = {first: None}
    aligned = _aligned(weights, minimum, total, machine)
    if aligned is not None:
        chosen.setdefault(aligned)
    source = _all(units, len(weights)) if _count(units, len(weights)) <= 4 * cap else _sample(units, weights, cap, rng)
    for counts in source:
        if len(chosen) >= cap:
            break
        sizes = tuple(count * unit + (rest if g == heaviest else 0) for g, count in enumerate(counts))
        if all(size >= low for size, low in zip(sizes, minimum, strict=True)):
            chosen.setdefault(sizes)
    return tuple(chosen)


def _aligned(weights: Sequence[float], minimum: Sequence[int], total: int, machine: int) -> Composition | None:
    """Return the proportional composition in whole machines; GPUs left over go to the group with the most work."""
    least = [-(-low // machine) for low in minimum]
    sizes = proportional_composition(weights, least, total // machine)
    if sizes is None:
        return None
    heaviest = max(range(len(weights)), key=lambda index: weights[index])
    rest = total % machine
    return tuple(size * machine + (rest if g == heaviest else 0) for g, size in enumerate(sizes))


def _change(sizes: list[int], weights: Sequence[float], minimum: Sequence[int], step: int) -> None:
    """Give one GPU to the group with the most work per GPU, or take one from the group with the least."""
    groups = [g for g in range(len(sizes)) if step > 0 or sizes[g] > minimum[g]]
    chosen = max(groups, key=lambda g: step * weights[g] / max(1, sizes[g] + min(step, 0)))
    sizes[chosen] += step


def _count(units: int, groups: int) -> int:
    return math.comb(units - 1, groups - 1) if units >= groups else 0


def _all(units: int, groups: int) -> Iterator[tuple[int, ...]]:
    """Yield every composition of `units`, the most even ones first."""
    found = []
    for cuts in combinations(range(1, units), groups - 1):
        edges = (0, *cuts, units)
        found.append(tuple(b - a for a, b in pairwise(edges)))
    found.sort(key=lambda counts: (max(counts) - min(counts), counts))
    yield from found


def _sample(units: int, weights: Sequence[float], cap: int, rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """Yield random compositions: half near the proportional one, half uniform."""
    groups = len(weights)
    if units < groups:
        return
    shares = np.array(weights) / sum(weights)
    for draw in range(_DRAWS_PER_COMPOSITION * cap):
        if draw % 2:
            cuts = np.sort(rng.choice(units - 1, size=groups - 1, replace=False)) + 1
            yield tuple(int(part) for part in np.diff(np.concatenate(([0], cuts, [units]))))
        else:
            drawn = rng.dirichlet(shares * 6.0 + 0.5)
            sizes = proportional_composition([float(x) + 1e-9 for x in drawn], [1] * groups, units)
            if sizes is not None:
                yield sizes
