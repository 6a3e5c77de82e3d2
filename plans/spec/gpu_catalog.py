"""Built-in GPU types, by exact name, with the source of each number.

An unknown name is an error, never a guess. Compute is dense BF16 (FP16 where the chip has no BF16), HBM is the
data-sheet rate, prices are on-demand list prices per GPU and hour: they age, so a cluster file may override any.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Self

from pydantic import Field, model_validator

from plans.spec.model import SpecModel
from plans.units import gb_s_to_bytes_per_s, gb_to_bytes, tflops_to_flop_per_s

#: Default share of a GPU's memory kept for the runtime context, and its cap in GB (hetrl.md 5: 1-3 GB; reconstruction).
RESERVE_FRACTION = 0.05
RESERVE_CAP_GB = 2.0


class GpuType(SpecModel):
    """What one GPU of a type can do."""

    memory_gb: float = Field(gt=0)
    """Memory in 1e9 bytes."""
    tflops: float = Field(gt=0)
    """Dense BF16 rate in 1e12 FLOP/s."""
    hbm_gb_s: float = Field(gt=0)
    """Memory bandwidth in 1e9 bytes/s."""
    usd_per_hour: float = Field(ge=0)
    """Price of one GPU for one hour."""
    reserve_gb: float | None = Field(default=None, ge=0)
    """Memory kept for runtime contexts; absent = 5 % of the memory, at most 2 GB."""

    @model_validator(mode="after")
    def _leaves_memory(self) -> Self:
        if self.reserve_gb is not None and self.reserve_gb >= self.memory_gb:
            raise ValueError("reserve_gb leaves some of memory_gb free")
        return self

    @property
    def reserve_bytes(self) -> float:
        """Bytes kept for runtime contexts."""
        if self.reserve_gb is not None:
            return gb_to_bytes(self.reserve_gb)
        return gb_to_bytes(min(RESERVE_CAP_GB, RESERVE_FRACTION * self.memory_gb))

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes."""
        return gb_to_bytes(self.memory_gb)

    @property
    def compute_flop_per_s(self) -> float:
        """Peak FLOP per second."""
        return tflops_to_flop_per_s(self.tflops)

    @property
    def hbm_bytes_per_s(self) -> float:
        """Memory bandwidth in bytes per second."""
        return gb_s_to_bytes_per_s(self.hbm_gb_s)


def _gpu(memory_gb: float, tflops: float, hbm_gb_s: float, usd_per_hour: float) -> GpuType:
    return GpuType(memory_gb=memory_gb, tflops=tflops, hbm_gb_s=hbm_gb_s, usd_per_hour=usd_per_hour)


#: The catalogue. Order: data centre by generation, then consumer, other vendors, CPU.
GPU_CATALOG: MappingProxyType[str, GpuType] = MappingProxyType({
    # NVIDIA A100 data sheet: 312 TFLOP/s BF16; 40 GB part 1,555 GB/s. AWS p4d.24xlarge 32.77 $/h / 8.
    "A100-40": _gpu(40, 312, 1555, 4.10),
    # Same sheet, SXM 80 GB: 2,039 GB/s. AWS p4de.24xlarge 40.97 $/h / 8.
    "A100-80": _gpu(80, 312, 2039, 5.12),
    # NVIDIA H100 SXM: 989.4 TFLOP/s dense, 3.35 TB/s. AWS p5.48xlarge after the June 2025 cut, 55.04 $/h / 8.
    "H100": _gpu(80, 989, 3350, 6.88),
    # NVIDIA H200 SXM: H100 compute, 141 GB at 4.8 TB/s. AWS p5en.48xlarge 63.30 $/h / 8.
    "H200": _gpu(141, 989, 4800, 7.91),
    # H20: 148 TFLOP/s, 4 TB/s, 1.85 $/h from AReaL-Hex (arXiv 2511.00796), 96 GB from the vendor's sheet.
    "H20": _gpu(96, 148, 4000, 1.85),
    # H800 as AReaL-Hex states it: 756 TFLOP/s, 2 TB/s, 5.28 $/h; 80 GB.
    "H800": _gpu(80, 756, 2000, 5.28),
    # NVIDIA HGX B200: 180 GB usable, 2,250 TFLOP/s dense, 8 TB/s. AWS p6-b200.48xlarge 113.93 $/h / 8.
    "B200": _gpu(180, 2250, 8000, 14.24),
    # NVIDIA L40S data sheet: 362 TFLOP/s dense, 864 GB/s (HetRL's Table 1 prints 366). AWS g6e.xlarge.
    "L40S": _gpu(48, 362, 864, 1.86),
    # NVIDIA L4 data sheet: 121 TFLOP/s dense, 300 GB/s. AWS g6.xlarge.
    "L4": _gpu(24, 121, 300, 0.80),
    # AWS's A10G: 70 TFLOP/s dense, 600 GB/s. AWS g5.xlarge.
    "A10G": _gpu(24, 70, 600, 1.01),
    # NVIDIA V100 SXM2 16 GB: 125 TFLOP/s FP16 (the chip has no BF16), 900 GB/s. AWS p3.2xlarge.
    "V100": _gpu(16, 125, 900, 3.06),
    # The 32 GB part. AWS p3dn.24xlarge 31.21 $/h / 8.
    "V100-32": _gpu(32, 125, 900, 3.90),
    # NVIDIA Ada white paper: 165.2 TFLOP/s FP16 with FP32 accumulation, 1,008 GB/s. Typical rental price.
    "RTX 4090": _gpu(24, 165.2, 1008, 0.69),
    # AMD MI300X data sheet: 1,307.4 TFLOP/s dense, 5.3 TB/s. Azure ND96isr MI300X v5 48 $/h / 8.
    "MI300X": _gpu(192, 1307.4, 5300, 6.00),
    # A CPU worker, nominal: one process of a small server (two cores, 8 GB). Measure it with the profile stage.
    "cpu": _gpu(8, 0.1, 20, 0.05),
})  # fmt: skip
