"""HetRL's 64-GPU set-up in its four network scenarios (hetrl.md 12.1 and 12.3)."""

from __future__ import annotations

from collections.abc import Sequence

from plans.spec.cluster import Cluster, LinkRate, Links, Machine, PairLink
from plans.spec.gpu_catalog import GPU_CATALOG, GpuType
from plans.testbeds.testbed import Testbed, checked
from plans.testbeds.wan import CONTINENT_LIMITS, COUNTRY_LIMITS, wan_links

#: Links inside a region: the network cards of the machines, which the paper leaves unshaped.
LOCAL_LINK = LinkRate(latency_ms=0.0, bandwidth_gbps=400.0)
#: A `g6.48xlarge` has a 100 Gbps card.
L4_CARD_GBPS = 100.0

#: GPU type -> (GB/s inside a machine, number of 8-GPU machines), Table 1.
TABLE_1 = {"A100-40": (600.0, 3), "L40S": (64.0, 3), "L4": (64.0, 2)}

_TABLE = "Table 1 of HetRL v1: 24 A100 (40 GB, 312 TFLOP/s, 2,039 GB/s, 600 GB/s inside a machine), 24 L40S (48 GB, 366, 864, 64), 16 L4 (24 GB, 121, 300, 64)."  # noqa: E501 one sentence
_EIGHT = "Machines of 8 GPUs (3 A100, 3 L40S, 2 L4), as the instance types with these GPUs have."
_PRICES = "Prices are the catalogue's."
_CARDS = "400 Gbps between machines of a region, 100 Gbps where one holds L4s (the instances' network cards)."
_SPREAD = "One 8-GPU machine per region; which machine is in which region is chosen here."
_FIT = "Delays are half of measured round trips between AWS regions, bandwidth is min(5, 56 / delay_ms) Gbps; both clamped to the published ranges."  # noqa: E501 one sentence


def paper_gpu_types() -> dict[str, GpuType]:
    """Return the GPU types with the numbers that HetRL prints, which differ from the data sheets in two places."""
    a100 = GPU_CATALOG["A100-40"].model_copy(update={"hbm_gb_s": 2039.0})
    l40s = GPU_CATALOG["L40S"].model_copy(update={"tflops": 366.0})
    return {"A100-40": a100, "L40S": l40s, "L4": GPU_CATALOG["L4"]}


def paper_machine(name: str, region: str, gpu: str) -> Machine:
    """Return one 8-GPU machine of Table 1."""
    return Machine(name=name, region=region, gpu=gpu, count=8, intra_gb_s=TABLE_1[gpu][0])


def single_region() -> Testbed:
    """Return scenario 1: all 64 GPUs in one region."""
    machines = [
        paper_machine(f"{_short(gpu)}-{index}", "virginia", gpu)
        for gpu, (_, count) in TABLE_1.items()
        for index in range(count)
    ]
    links = Links(same_zone=LOCAL_LINK, machines=_card_overrides(machines))
    return _testbed("hetrl-single-region", machines, links, (_TABLE, "No network emulation."), (_EIGHT, _CARDS))


def multi_region_hybrid() -> Testbed:
    """Return scenario 2: Virginia and Ohio, and edge GPUs that only Virginia reaches."""
    places = (("virginia", "A100-40", 3), ("ohio", "L40S", 3), ("edge", "L4", 2))
    machines = [
        paper_machine(f"{region[:2]}-{index}", region, gpu) for region, gpu, count in places for index in range(count)
    ]
    links = Links(
        same_zone=LOCAL_LINK,
        regions=(
            PairLink(between=("virginia", "ohio"), latency_ms=10.0, bandwidth_gbps=5.0),
            PairLink(between=("virginia", "edge"), latency_ms=10.0, bandwidth_gbps=1.0),
            PairLink(between=("ohio", "edge"), forbidden=True),
        ),
        machines=(PairLink(between=("ed-0", "ed-1"), latency_ms=10.0, bandwidth_gbps=1.0),),
    )
    published = (
        _TABLE,
        "Virginia-Ohio: 10 ms and 5 Gbps; links that touch an edge GPU: 1 Gbps; no link between edge and Ohio.",
    )
    chosen = (
        _EIGHT,
        "A100 in Virginia, L40S in Ohio, L4 at the edge (the paper: edge GPUs are a subset of Virginia's).",
        "The delay of edge links is taken as 10 ms; 400 Gbps between machines of Virginia and of Ohio.",
    )
    return _testbed("hetrl-multi-region-hybrid", machines, links, published, chosen)


def multi_country() -> Testbed:
    """Return scenario 3: eight European regions, one machine each."""
    regions = ("paris", "stockholm", "london", "ireland", "spain", "zurich", "frankfurt", "milan")
    links = Links(same_zone=LOCAL_LINK, regions=wan_links(regions, COUNTRY_LIMITS))
    published = (_TABLE, "Eight European regions, 5-30 ms, 1.9-5.0 Gbps.")
    return _testbed("hetrl-multi-country", _spread(regions), links, published, (_EIGHT, _SPREAD, _FIT))


def multi_continent() -> Testbed:
    """Return scenario 4: eight regions in the USA and Europe, one machine each."""
    regions = ("virginia", "ohio", "paris", "stockholm", "london", "ireland", "frankfurt", "milan")
    links = Links(same_zone=LOCAL_LINK, regions=wan_links(regions, CONTINENT_LIMITS))
    published = (_TABLE, "Eight regions in Europe and the USA, Virginia and Ohio among them, 5-60 ms, 0.9-5.0 Gbps.")
    chosen = (_EIGHT, _SPREAD, "The six European regions beside Virginia and Ohio.", _FIT)
    return _testbed("hetrl-multi-continent", _spread(regions), links, published, chosen)


def _spread(regions: Sequence[str]) -> list[Machine]:
    """Place one machine per region: A100 and L40S alternate, the L4 machines come last."""
    order = ("A100-40", "L40S", "A100-40", "L40S", "A100-40", "L40S", "L4", "L4")
    return [paper_machine(f"{region}-0", region, gpu) for region, gpu in zip(regions, order, strict=True)]


def _card_overrides(machines: Sequence[Machine]) -> tuple[PairLink, ...]:
    slow = {m.name for m in machines if m.gpu == "L4"}
    pairs = [(a.name, b.name) for i, a in enumerate(machines) for b in machines[i + 1 :]]
    return tuple(
        PairLink(between=pair, latency_ms=0.0, bandwidth_gbps=L4_CARD_GBPS) for pair in pairs if slow & set(pair)
    )


def _short(gpu: str) -> str:
    return gpu.partition("-")[0].lower()


def _testbed(
    name: str, machines: Sequence[Machine], links: Links, published: tuple[str, ...], reconstructed: tuple[str, ...]
) -> Testbed:
    cluster = Cluster(name=name, gpu_types=paper_gpu_types(), machines=tuple(machines), links=links)
    return checked(Testbed(cluster=cluster, published=published, reconstructed=(*reconstructed, _PRICES)))
