"""Units of the input files and the only conversions into the planner's base units.

Inside the planner every quantity is in seconds, bytes, bytes per second, FLOP and FLOP per second. Prefixes are
decimal: the files say `gb` = 1e9 bytes, `gbps` = 1e9 bits per second, `tflops` = 1e12 FLOP per second.
"""

from __future__ import annotations

BYTES_PER_GB = 1e9
BITS_PER_BYTE = 8.0
BITS_PER_GBIT = 1e9
FLOP_PER_TFLOP = 1e12
S_PER_MS = 1e-3
S_PER_HOUR = 3600.0


def gb_to_bytes(gigabytes: float) -> float:
    """Return bytes for decimal gigabytes."""
    return gigabytes * BYTES_PER_GB


def bytes_to_gb(num_bytes: float) -> float:
    """Return decimal gigabytes for bytes."""
    return num_bytes / BYTES_PER_GB


def gbps_to_bytes_per_s(gigabits_per_s: float) -> float:
    """Return bytes per second for a network rate in 1e9 bits per second."""
    return gigabits_per_s * BITS_PER_GBIT / BITS_PER_BYTE


def gb_s_to_bytes_per_s(gigabytes_per_s: float) -> float:
    """Return bytes per second for a memory or bus rate in 1e9 bytes per second."""
    return gigabytes_per_s * BYTES_PER_GB


def tflops_to_flop_per_s(tflops: float) -> float:
    """Return FLOP per second for 1e12 FLOP per second."""
    return tflops * FLOP_PER_TFLOP


def ms_to_s(milliseconds: float) -> float:
    """Return seconds for milliseconds."""
    return milliseconds * S_PER_MS
