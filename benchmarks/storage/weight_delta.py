"""A policy version over an emulated link: its delta against a plain copy of all files.

`python -m benchmarks.storage.weight_delta --versions DIR` with the folders that `smollm2_versions` makes. Both ways end
with a proved folder that an engine can load; equality is checked byte for byte. Hashing a new version for its manifest
is part of publishing it either way and is left out. CPU seconds are those of all threads.
`model_s` is CPU seconds plus the link's own time (bytes by rate, and four delays): what an idle machine would take
without overlap. The ratio compares that, since wall seconds say little on a busy machine.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.storage.record import write_result
from benchmarks.storage.shaped_store import ShapedStore
from storage.delta_apply import apply_deltas
from storage.policies import DELTA_PART, LocalPolicy, Policy, publish_policy
from storage.policy_fetch import fetch_policy, local_policy_folder
from storage.store import Store, open_store
from storage.weight_delta import encode_delta, parse_delta
from storage.weights_hash import tensor_digests

RUN = "bench"


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=Path, required=True)
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--delay-ms", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    folders = sorted((path for path in given.versions.iterdir() if path.is_dir()), key=lambda path: int(path.name))
    link = {"bytes_per_s": given.gbps * 1e9 / 8, "delay_s": given.delay_ms / 1e3}
    data = []
    for before, after in pairwise(folders):
        with tempfile.TemporaryDirectory() as name:
            data.append(
                {"step": f"{before.name} to {after.name}", **step(before, after, Path(name), link, given.repeats)}
            )
    write_result("weight_delta", {"model": "SmolLM2-135M bf16", **link, "repeats": given.repeats}, data)


def step(before: Path, after: Path, folder: Path, link: dict[str, float], repeats: int) -> dict[str, Any]:
    """Return what one version costs by either way."""
    store = open_store(str(folder / "home"), is_synced=False)
    base = _in_place(store, publish_policy(store, RUN, 1, files_of(before), created_by="bench"))
    policy = publish_policy(store, RUN, 2, files_of(after), created_by="bench", base=base)
    digests = tensor_digests(files_of(after))
    making = _seconds(lambda: _make(base, after, digests), repeats)
    whole = _fetched(store, policy, [], folder / "whole", link, repeats, after)
    delta = _fetched(store, policy, [base], folder / "delta", link, repeats, after)
    applying = _seconds(lambda: _apply(base, store, policy, folder / "apply"), repeats)
    for way in (whole, delta):
        way["link_s"] = way["bytes"] / link["bytes_per_s"] + 4 * link["delay_s"]
    whole["model_s"] = whole["cpu_s"] + whole["link_s"]
    delta["model_s"] = delta["cpu_s"] + delta["link_s"] + making["cpu_s"]
    return {
        "policy_bytes": policy.size,
        "delta_bytes": policy.manifest.part(DELTA_PART).size,
        "bytes_ratio": policy.size / policy.manifest.part(DELTA_PART).size,
        "make": making,
        "apply": {**applying, "mb_per_cpu_s": policy.size / 1e6 / applying["cpu_s"]},
        "whole": whole,
        "delta": delta,
        "time_ratio": whole["model_s"] / delta["model_s"],
        "wall_ratio": whole["wall_s"] / (delta["wall_s"] + making["wall_s"]),
    }


def files_of(folder: Path) -> dict[str, Path]:
    """Return a version's files by name."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}


def _in_place(store: Store, policy: Policy) -> LocalPolicy:
    folder = local_policy_folder(store, policy)
    if folder is None:
        raise RuntimeError("the benchmark's own store is a local folder")
    return LocalPolicy(policy, folder)


def _make(base: LocalPolicy, after: Path, digests: dict[str, str]) -> None:
    files = files_of(after)
    encode_delta(base.weight_files(), files, base_weights_hash=base.policy.weights_hash, digests=digests)


def _apply(base: LocalPolicy, store: Store, policy: Policy, out: Path) -> None:
    delta = parse_delta(store.read_bytes(policy.manifest.part(DELTA_PART).path), "delta")
    out.mkdir(exist_ok=True)
    apply_deltas(base.weight_files(), [delta], out)


def _fetched(
    store: Store, policy: Policy, bases: list[LocalPolicy], out: Path, link: dict[str, float], repeats: int, after: Path
) -> dict[str, Any]:
    found: list[tuple[float, float]] = []
    num_bytes = 0
    for _ in range(repeats):
        shutil.rmtree(out, ignore_errors=True)
        far: Any = ShapedStore(store, **link)
        cpu, wall = time.process_time(), time.perf_counter()
        local = fetch_policy([far], policy, out, bases).local
        found.append((time.process_time() - cpu, time.perf_counter() - wall))
        num_bytes = far.num_bytes
        for name, path in files_of(after).items():
            if (local.folder / name).read_bytes() != path.read_bytes():
                raise RuntimeError(f"{name} is not equal byte for byte")
    return {"bytes": num_bytes, "cpu_s": median(f[0] for f in found), "wall_s": median(f[1] for f in found)}


def _seconds(action: Callable[[], None], repeats: int) -> dict[str, float]:
    found = []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        action()
        found.append((time.process_time() - cpu, time.perf_counter() - wall))
    return {"cpu_s": median(f[0] for f in found), "wall_s": median(f[1] for f in found)}


if __name__ == "__main__":
    main()
