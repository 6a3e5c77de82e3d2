"""Measures one device in a process of its own: `python -m stages.device_probe --device cpu --threads 2` prints JSON.

Run as a child of the profile stage, so that the stage never imports torch and the thread count is set before the
library is loaded. Without torch, numpy measures the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MATRIX = 1024
"""Side of the square matrices of the CPU measurement; 4 MiB each in fp32, beyond the second-level cache."""
_CUDA_MATRIX = 8192
_COPY_BYTES = 256 * 2**20
"""Bytes of the copied block: beyond every cache."""
_SECONDS_PER_NUMBER = 0.4
"""Time spent on each number, after one unmeasured round."""


def rate_per_s(amount: float, work: Callable[[], object], settle: Callable[[], object]) -> float:
    """Return units per second of the best round.

    Args:
        amount: Units that one round does (FLOP, bytes).
        work: One round; may only start it.
        settle: Waits until started work has ended.
    """
    work()
    settle()
    best_s, end = float("inf"), time.perf_counter() + _SECONDS_PER_NUMBER
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        settle()
        best_s = min(best_s, time.perf_counter() - start)
    return amount / best_s


def measure_torch(device: str) -> dict[str, Any]:
    """Return the numbers of a device as torch reaches it."""
    import torch

    is_cuda = device == "cuda"
    side = _CUDA_MATRIX if is_cuda else _MATRIX
    settle: Callable[[], object] = torch.cuda.synchronize if is_cuda else lambda: None
    flop_per_s = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
        flop_per_s[name] = rate_per_s(2.0 * side**3, lambda a=a, b=b: torch.mm(a, b), settle)  # type: ignore[misc] # bound early
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copied = rate_per_s(2.0 * _COPY_BYTES, lambda: target.copy_(source), settle)
    properties = torch.cuda.get_device_properties(0) if is_cuda else None
    return {
        "library": f"torch {torch.__version__}",
        "device_name": properties.name if properties else cpu_name(),
        "num_devices": torch.cuda.device_count() if is_cuda else os.cpu_count(),
        "memory_bytes": properties.total_memory if properties else memory_bytes(),
        "flop_per_s": flop_per_s,
        "memory_bytes_per_s": copied,
    }


def measure_numpy() -> dict[str, Any]:
    """Return the numbers of the CPU as numpy reaches them; it has no bf16."""
    import numpy as np

    a = np.ones((_MATRIX, _MATRIX), dtype=np.float32)
    source = np.ones(_COPY_BYTES // 4, dtype=np.float32)
    target = np.empty_like(source)
    return {
        "library": f"numpy {np.__version__}",
        "device_name": cpu_name(),
        "num_devices": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "flop_per_s": {"fp32": rate_per_s(2.0 * _MATRIX**3, lambda: a @ a, lambda: None)},
        "memory_bytes_per_s": rate_per_s(2.0 * _COPY_BYTES, lambda: np.copyto(target, source), lambda: None),
    }


def cpu_name() -> str:
    """Return the processor's name as the operating system has it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the memory of this machine, bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def main() -> int:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m stages.device_probe")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(options.threads)
    try:
        import torch
    except ImportError:
        if options.device == "cuda":
            sys.stderr.write("torch is not installed in this environment, and nothing else reaches the GPUs\n")
            return 1
        numbers = measure_numpy()
    else:
        torch.set_num_threads(options.threads)
        numbers = measure_torch(options.device)
    sys.stdout.write(json.dumps({**numbers, "device": options.device, "threads": options.threads}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
