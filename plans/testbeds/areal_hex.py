"""AReaL-Hex's H800/H20 clusters at its published budgets (areal_hex.md 1.5 and 1.6)."""

from __future__ import annotations

from plans.spec.cluster import Cluster, LinkRate, Links, Machine, PairLink
from plans.spec.gpu_catalog import GPU_CATALOG
from plans.testbeds.testbed import Testbed, checked

#: Name -> (H800, H20) GPU counts. The dollars per hour follow from 5.28 and 1.85.
BUDGETS: dict[str, tuple[int, int]] = {
    "areal-hex-8-24": (8, 24),  # 86.64 $/h, the mixed cluster of the main comparison
    "areal-hex-8-48": (8, 48),  # 131.04 $/h, the 56-GPU mix
    "areal-hex-24-24": (24, 24),  # 171.12 $/h, the motivating study
    "areal-hex-h800-24": (24, 0),  # 126.72 $/h
    "areal-hex-h800-32": (32, 0),  # 168.96 $/h
    "areal-hex-h20-88": (0, 88),  # 162.80 $/h
}

_SAME_TYPE_GBPS = 40.0  # 5 GB/s
_ACROSS_GBPS = 12.0  # 1.5 GB/s
_NVLINK_GB_S = {"H800": 200.0, "H20": 450.0}


def areal_hex(name: str) -> Testbed:
    """Return one of the clusters named in `BUDGETS`; raises KeyError for another name."""
    counts = dict(zip(("H800", "H20"), BUDGETS[name], strict=True))
    machines = tuple(
        Machine(
            name=f"{gpu.lower()}-{index}",
            region=f"{gpu.lower()}-site",
            gpu=gpu,
            count=8,
            intra_gb_s=_NVLINK_GB_S[gpu],
        )
        for gpu, count in counts.items()
        for index in range(count // 8)
    )
    mixed = all(counts.values())
    across = PairLink(between=("h800-site", "h20-site"), latency_ms=0.5, bandwidth_gbps=_ACROSS_GBPS)
    links = Links(
        same_zone=LinkRate(latency_ms=0.0, bandwidth_gbps=_SAME_TYPE_GBPS), regions=(across,) if mixed else ()
    )
    used = {gpu: GPU_CATALOG[gpu] for gpu, count in counts.items() if count}
    cluster = Cluster(name=name, gpu_types=used, machines=machines, links=links)
    usd = sum(count * GPU_CATALOG[gpu].usd_per_hour for gpu, count in counts.items())
    return checked(
        Testbed(
            cluster=cluster,
            published=(
                "H800: 756 TFLOP/s, 2 TB/s, NVLink 200 GB/s, 5.28 $/h. H20: 148 TFLOP/s, 4 TB/s, 450 GB/s, 1.85 $/h.",
                "5 GB/s between machines of one type, 1.5 GB/s between H800 and H20.",
                f"A budget of {usd:.2f} $/h.",
            ),
            reconstructed=(
                f"{counts['H800']} H800 and {counts['H20']} H20 follow from the budget; machines of 8 GPUs.",
                "Latencies (0 inside a site, 0.5 ms between them) and memory sizes (80 and 96 GB).",
            ),
        )
    )
