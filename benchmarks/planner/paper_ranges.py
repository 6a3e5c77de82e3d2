"""What HetRL reports (hetrl.md 13), to put our ratios beside."""

from __future__ import annotations

Range = tuple[float, float]

#: Baseline -> scenario -> published range of the speed-up of HetRL. Sync is against verl; async against both.
SPEED_UPS: dict[str, dict[str, Range]] = {
    "sync verl": {
        "hetrl-single-region": (1.51, 2.05),
        "hetrl-multi-region-hybrid": (3.01, 4.99),
        "hetrl-multi-country": (1.4, 3.07),
        "hetrl-multi-continent": (2.24, 5.46),
    },
    "async streamrl": {
        "hetrl-single-region": (1.1, 1.31),
        "hetrl-multi-region-hybrid": (1.11, 1.27),
        "hetrl-multi-country": (1.19, 1.5),
        "hetrl-multi-continent": (2.25, 3.72),
    },
    "async verl": {
        "hetrl-single-region": (1.1, 1.31),
        "hetrl-multi-region-hybrid": (4.07, 9.17),
        "hetrl-multi-country": (1.71, 4.0),
        "hetrl-multi-continent": (4.38, 10.76),
    },
}

#: GPU combinations, 8B, single region: HetRL over verl.
COMBINATIONS: dict[str, Range] = {
    "ppo sync": (1.72, 4.33),
    "grpo sync": (1.77, 3.42),
    "ppo async": (1.57, 3.33),
    "grpo async": (1.57, 3.03),
}
#: All 64 GPUs over the 24 A100s.
ALL_OVER_A100: Range = (1.57, 2.0)
#: Load balancing on over off, sync: up to these.
LOAD_BALANCING: dict[str, Range] = {"hetrl-single-region": (1.0, 1.12), "hetrl-multi-region-hybrid": (1.0, 1.18)}


def verdict(ratio: float | None, published: Range | None) -> str:
    """Return `in`, `above` or `below` the published range; `-` without one of the two."""
    if ratio is None or published is None:
        return "-"
    if ratio < published[0]:
        return "below"
    return "above" if ratio > published[1] else "in"
