"""Clusters of 8 to 4,096 GPUs with HetRL's mix of GPU types, for scaling studies. All numbers here are ours."""

from __future__ import annotations

from plans.spec.cluster import Cluster, Links, Machine
from plans.testbeds.hetrl import LOCAL_LINK, paper_gpu_types, paper_machine
from plans.testbeds.testbed import Testbed, UnknownTestbedError, checked
from plans.testbeds.wan import CONTINENT_LIMITS, REGIONS, wan_links

MAX_GPUS = 4096
_GPUS_PER_MACHINE = 8
#: The eight machines of HetRL's Table 1; larger clusters repeat the pattern.
_PATTERN = ("A100-40", "L40S", "A100-40", "L40S", "L4", "A100-40", "L40S", "L4")


def scaling(num_gpus: int, num_regions: int | None = None) -> Testbed:
    """Return a cluster of 8-GPU machines in HetRL's mix, dealt out over cloud regions in blocks.

    Args:
        num_gpus: a multiple of 8 from 8 to 4,096.
        num_regions: regions used, at most ten; absent = one per 16 machines, at least two, at most ten.

    Raises:
        UnknownTestbedError: another size.
    """
    if num_gpus % _GPUS_PER_MACHINE or not _GPUS_PER_MACHINE <= num_gpus <= MAX_GPUS:
        raise UnknownTestbedError(f"{num_gpus} GPUs asked for, but sizes are multiples of 8 from 8 to {MAX_GPUS}.")
    count = num_gpus // _GPUS_PER_MACHINE
    wanted = max(2, count // 16) if num_regions is None else num_regions
    regions = REGIONS[: max(1, min(wanted, count, len(REGIONS)))]
    machines = tuple(_machine(index, count, regions) for index in range(count))
    cluster = Cluster(
        name=f"scaling-{num_gpus}",
        gpu_types=paper_gpu_types(),
        machines=machines,
        links=Links(same_zone=LOCAL_LINK, regions=wan_links(regions, CONTINENT_LIMITS)),
    )
    return checked(
        Testbed(
            cluster=cluster,
            published=("GPU types and their mix: Table 1 of HetRL v1.",),
            reconstructed=(
                f"{count} machines of 8 GPUs over {len(regions)} regions; links as in hetrl-multi-continent.",
            ),
        )
    )


def _machine(index: int, count: int, regions: tuple[str, ...]) -> Machine:
    region = regions[index * len(regions) // count]
    return paper_machine(f"{region[:2]}-{index}", region, _PATTERN[index % len(_PATTERN)])
