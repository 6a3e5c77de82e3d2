"""How much of an emulated link parallel ranged reads use: `python -m benchmarks.storage.link_use`.

The link is 1 Gbps with 60 ms each way unless told otherwise. Its capacity is what one transfer could reach that asked
for everything at once: bytes by rate, and one round trip.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.storage.record import write_result
from benchmarks.storage.shaped_store import ShapedStore
from storage.manifest import Part
from storage.store import open_store
from storage.transfer import Link, fetch_part


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--delay-ms", type=float, default=60.0)
    given = parser.parse_args()
    rate, delay = given.gbps * 1e9 / 8, given.delay_ms / 1e3
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = open_store(str(folder / "store"), is_synced=False)
        data = os.urandom(given.megabytes << 20)
        store.publish("run/object", data)
        part = Part(name="o", path="run/object", size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for readers in (1, 2, 4, 8):
            far: Any = ShapedStore(store, bytes_per_s=rate, delay_s=delay)
            cpu, wall = time.process_time(), time.perf_counter()
            fetch_part(far, part, folder / str(readers), Link(num_readers=readers))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            ideal = len(data) / rate + 2 * delay
            rows.append({"readers": readers, "wall_s": wall, "cpu_s": cpu, "ideal_s": ideal, "used": ideal / wall})
    write_result("link_use", {"megabytes": given.megabytes, "bytes_per_s": rate, "delay_s": delay}, rows)


if __name__ == "__main__":
    main()
