"""Every testbed by name."""

from __future__ import annotations

from collections.abc import Callable

from plans.testbeds.areal_hex import BUDGETS, areal_hex
from plans.testbeds.hetrl import multi_continent, multi_country, multi_region_hybrid, single_region
from plans.testbeds.scaling import scaling
from plans.testbeds.testbed import Testbed, UnknownTestbedError, machine_subset

#: GPU counts of the small instances on which exact methods prove an optimum: one GPU type mix per size.
SMALL_COUNTS: dict[int, dict[str, int]] = {
    8: {"A100-40": 4, "L40S": 4},
    16: {"A100-40": 8, "L40S": 8},
    24: {"A100-40": 8, "L40S": 8, "L4": 8},
}
SCALING_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

HETRL_SCENARIOS: dict[str, Callable[[], Testbed]] = {
    "hetrl-single-region": single_region,
    "hetrl-multi-region-hybrid": multi_region_hybrid,
    "hetrl-multi-country": multi_country,
    "hetrl-multi-continent": multi_continent,
}


def testbed_names() -> tuple[str, ...]:
    """Return every registered name, in the order of the documentation."""
    small = tuple(f"{name}-{size}" for name in HETRL_SCENARIOS for size in SMALL_COUNTS)
    return (*HETRL_SCENARIOS, *small, *BUDGETS, *(f"scaling-{size}" for size in SCALING_SIZES))


def find_testbed(name: str) -> Testbed:
    """Return a testbed by name; `scaling-N` works for every multiple of 8 up to 4,096.

    Raises:
        UnknownTestbedError: the name is not one of `testbed_names()`.
    """
    if name in HETRL_SCENARIOS:
        return HETRL_SCENARIOS[name]()
    if name in BUDGETS:
        return areal_hex(name)
    stem, _, size = name.rpartition("-")
    if size.isdigit() and stem == "scaling":
        return scaling(int(size))
    if size.isdigit() and stem in HETRL_SCENARIOS and int(size) in SMALL_COUNTS:
        return machine_subset(HETRL_SCENARIOS[stem](), SMALL_COUNTS[int(size)], name=name)
    raise UnknownTestbedError(f"testbed {name!r} is unknown; the names are {', '.join(testbed_names())}.")
