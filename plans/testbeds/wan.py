"""Delays and bandwidths between cloud regions (hetrl.md 12.3).

The paper prints ranges only. The one-way delays are half of the round-trip times that a public measurement of AWS
regions gives; rows marked by the source as distance-fit (Spain, Zurich) are estimates. Bandwidth follows the one
law that fits every published anchor: `min(5, 56 / delay_ms)` Gbps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from plans.spec.cluster import PairLink

REGIONS = (
    "virginia", "ohio", "paris", "stockholm", "london", "ireland", "spain", "zurich", "frankfurt", "milan",
)  # fmt: skip

#: Upper triangle of one-way delays in ms, in the order of `REGIONS`.
_UPPER_MS: tuple[tuple[float, ...], ...] = (
    (6.5, 41.5, 56, 38, 34.5, 45, 50.5, 45.5, 50.5),
    (46, 60.5, 43, 39.5, 50, 55, 51, 55),
    (15, 4.5, 9, 10, 6.5, 6, 10),
    (16.5, 20.5, 25, 16, 11, 15.5),
    (6.5, 12.5, 9.5, 8.5, 12.5),
    (15, 14, 13, 17.5),
    (11.5, 13.5, 11),
    (5, 4),
    (6,),
)

#: Smallest and largest delay (ms) and bandwidth (Gbps) that the paper states per scenario.
COUNTRY_LIMITS = {"delay_ms": (5.0, 30.0), "gbps": (1.9, 5.0)}
CONTINENT_LIMITS = {"delay_ms": (5.0, 60.0), "gbps": (0.9, 5.0)}

_MAX_GBPS = 5.0
_GBPS_MS = 56.0


def delay_ms(region_a: str, region_b: str) -> float:
    """Return the one-way delay between two different regions of `REGIONS`, in ms."""
    i, j = sorted((REGIONS.index(region_a), REGIONS.index(region_b)))
    return float(_UPPER_MS[i][j - i - 1])


def wan_links(regions: Sequence[str], limits: Mapping[str, tuple[float, float]]) -> tuple[PairLink, ...]:
    """Return a link for every pair of regions, clamped to a scenario's published ranges."""
    return tuple(_link(a, b, limits) for a, b in combinations(regions, 2))


def _link(region_a: str, region_b: str, limits: Mapping[str, tuple[float, float]]) -> PairLink:
    low_ms, high_ms = limits["delay_ms"]
    low_gbps, high_gbps = limits["gbps"]
    delay = min(high_ms, max(low_ms, delay_ms(region_a, region_b)))
    gbps = min(high_gbps, max(low_gbps, round(min(_MAX_GBPS, _GBPS_MS / delay), 2)))
    return PairLink(between=(region_a, region_b), latency_ms=delay, bandwidth_gbps=gbps)
