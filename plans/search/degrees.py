"""Parallel degrees that an engine can run: tensor shards divide heads and MLP, stages do not outnumber layers."""

from __future__ import annotations

import math
from functools import lru_cache

from plans.spec.llm import LlmShape

#: About how many pipeline degrees guesses offer per set of units, beside those that divide their number.
MOST_PP = 12


def tp_degrees(shape: LlmShape, limit: int) -> tuple[int, ...]:
    """Return the tensor-parallel degrees up to `limit`: divisors of both the heads and the inner MLP size.

    HetRL bounds TP by the group only; the divisibility is what Megatron and vLLM ask for (extension).
    """
    return _divisors(math.gcd(shape.heads, shape.intermediate), limit)


@lru_cache(maxsize=1024)
def _divisors(number: int, limit: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)


def pp_degrees(shape: LlmShape, limit: int, *, most: int | None = None) -> tuple[int, ...]:
    """Return pipeline degrees up to `limit` and the layers; with `most`, about that many, dense at the low end."""
    return _depths(min(shape.layers, limit), most)


@lru_cache(maxsize=4096)
def _depths(highest: int, most: int | None) -> tuple[int, ...]:
    every = range(1, highest + 1)
    if most is None or highest <= most:
        return tuple(every)
    chosen = {1, 2, 3, 4, highest}
    step = (highest / 4.0) ** (1.0 / max(1, most - 5))
    value = 4.0
    while value < highest:
        chosen.add(round(value))
        value *= max(step, 1.05)
    return tuple(sorted(pp for pp in chosen if pp <= highest))


def offered_pp_degrees(shape: LlmShape, num_units: int) -> tuple[int, ...]:
    """Return some pipeline degrees for so many units, least first, and all that leave no unit idle."""
    return _offered(min(shape.layers, num_units), num_units)


@lru_cache(maxsize=4096)
def _offered(highest: int, num_units: int) -> tuple[int, ...]:
    exact = (pp for pp in range(1, highest + 1) if num_units % pp == 0)
    return tuple(sorted({*_depths(highest, MOST_PP), *exact}))


def all_degrees(shape: LlmShape, num_gpus: int) -> tuple[tuple[int, int, int], ...]:
    """Return every (dp, pp, tp) with product at most `num_gpus`."""
    return tuple(
        (dp, pp, tp)
        for tp in tp_degrees(shape, num_gpus)
        for pp in pp_degrees(shape, num_gpus // tp)
        for dp in range(1, num_gpus // (tp * pp) + 1)
    )
