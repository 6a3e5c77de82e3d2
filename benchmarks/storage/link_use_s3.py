"""How much of a shaped link a transfer from a real S3 server uses: `python -m benchmarks.storage.link_use_s3`.

Server, line and reader are processes of their own. Where namespaces are permitted the kernel limits the rate (tc tbf)
and the line only delays, else the line does both. CPU seconds of each say which of them is the limit on a busy machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.storage.record import write_result
from plans.spec.cluster import Cluster
from scripts.regions.layout import environment, planned
from scripts.regions.network import inside, start, stop, usable_mode
from storage.manifest import Part
from storage.store import open_store
from storage.transfer import Link, fetch_part

KEY = "run/object"


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--delay-ms", type=float, default=60.0)
    parser.add_argument("--readers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--ask", type=json.loads, help="one measurement, in the reader's process")
    given = parser.parse_args()
    if given.ask is not None:
        _ask(**given.ask)
        return
    with tempfile.TemporaryDirectory() as name:
        rows, mode = _measured(given, Path(name))
    settings = {"megabytes": given.megabytes, "gbps": given.gbps, "delay_s": given.delay_ms / 1e3, "mode": mode}
    write_result("link_use_s3", settings, rows)


def _measured(given: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], str]:
    cluster = Cluster.model_validate(
        {
            "name": "link",
            "machines": [
                {"name": f"{region}-0", "region": region, "gpu": "cpu", "count": 1} for region in ("near", "far")
            ],
            "links": {
                "regions": [{"between": ["near", "far"], "latency_ms": given.delay_ms, "bandwidth_gbps": given.gbps}]
            },
            "storage": {"near": "s3://near/x", "far": "s3://far/x"},
        }
    )
    layout = start(planned(cluster, folder, usable_mode()), folder)
    try:
        near, far = layout.regions
        data = os.urandom(given.megabytes << 20)
        path = far.folder / "s3" / "far" / "x" / KEY
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        rows = []
        for readers in given.readers:
            asked = {
                "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "readers": readers,
                "target": str(folder / f"arrived-{readers}"),
            }  # fmt: skip
            command = inside(near, [sys.executable, "-m", "benchmarks.storage.link_use_s3", "--ask", json.dumps(asked)])
            before = _cpu_s(layout.processes)
            done = subprocess.run(
                command, env={**os.environ, **environment(layout, near)}, capture_output=True, text=True, check=True
            )
            row = json.loads(done.stdout.splitlines()[-1])
            ideal = len(data) / (given.gbps * 1e9 / 8) + 2 * given.delay_ms / 1e3
            others = {
                name: after - earlier
                for (name, after), earlier in zip(_cpu_s(layout.processes).items(), before.values(), strict=True)
            }
            rows.append(
                {"readers": readers, **row, "ideal_s": ideal, "used": ideal / row["wall_s"], "cpu_s_of": others}
            )
        return rows, layout.mode
    finally:
        stop(layout, folder)


def _ask(size: int, sha256: str, readers: int, target: str) -> None:
    store = open_store("s3://far/x")
    store.size(KEY)  # the connection to the server is up
    part = Part(name="o", path=KEY, size=size, sha256=sha256)
    cpu, wall = time.process_time(), time.perf_counter()
    fetch_part(store, part, Path(target), Link(num_readers=readers))
    print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}))


def _cpu_s(processes: tuple[tuple[int, float], ...]) -> dict[str, float]:
    found = {}
    for pid, _ in processes:
        process = psutil.Process(pid)
        name = "server" if "rclone" in process.cmdline()[0] else "line"
        times = process.cpu_times()
        found[f"{name} {pid}"] = times.user + times.system
    return found


if __name__ == "__main__":
    main()
