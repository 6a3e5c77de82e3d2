"""What a run over several regions left: which rows lie where, and what of the policies crossed which link."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.regions.layout import Region, Regions, Way
from scripts.regions.tcp_proxy import requests_of
from storage.errors import ObjectMissingError
from storage.manifest import Manifest
from storage.parquet_io import read_table
from storage.policies import resolve_policy
from storage.rollout_schema import Family
from storage.rollouts import find_shard
from storage.store import Store, open_store

_POLICY: Final = re.compile(r"/policies/(\d+)/(?!fence/)[^/]+/(.+)")
"""A file of a policy version, in the folder of an attempt; the fence of attempts is none."""
_KINDS: Final = {
    "listings": r"^/[^/]+$",
    "fences and probes": r"/fence/|/_probe/",
    "policy, delta": r"/policies/\d+/[^/]+/delta/",
    "policy, whole weights": r"/policies/\d+/[^/]+/[^/]+\.safetensors$",
    "policy, manifests and others": r"/policies/",
    "resume points": r"/(trainer|critics)/",
    "rows": r"/iterations/.*\.parquet$",
    "manifests of rows": r"/iterations/.*/manifest\.json$",
    "records and plans": r"/(run|retention|record|plan)\.json$|/(plans|profiles)/",
    "leases": r"/leases/",
}
"""Kinds of objects by their keys; the first one that fits counts."""
_MOST_SHARDS: Final = 64
"""Shards looked for in a region."""
_ROWS: Final = re.compile(r"/iterations/(\d+)/.*\.parquet")


def store_of(region: Region) -> Store:
    """Return a region's store by its server's own folder: also readable when the server is down."""
    return open_store(str(region.folder / "s3" / region.root.removeprefix("s3://")))


def bytes_read(layout: Regions, way: Way, pattern: re.Pattern[str]) -> Counter[tuple[str, ...]]:
    """Return the bytes that came over a line, by what a pattern finds in the object's path."""
    found: Counter[tuple[str, ...]] = Counter()
    for request in requests_of(layout.journal(way)):
        match = pattern.search(str(request["path"]).partition("?")[0])
        if request["method"] == "GET" and match is not None and request["status"] in (200, 206):
            if request["received_bytes"] is None:
                raise ValueError(f"{layout.journal(way)}: the answer for {request['path']} did not say its length")
            found[match.groups()] += int(str(request["received_bytes"]))
    return found


@dataclass(slots=True)
class Traffic:
    """What crossed a line of one kind of objects."""

    num_requests: int = 0
    """Requests."""
    read_bytes: int | None = 0
    """Bytes of objects that came back; None where an answer did not announce its length."""
    written_bytes: int = 0
    """Bytes of objects that were sent."""


def traffic(journal: Path) -> dict[str, Traffic]:
    """Return what crossed a line, by kind of object; bodies only."""
    found: dict[str, Traffic] = {}
    for request in requests_of(journal):
        path = str(request["path"]).partition("?")[0]
        kind = next((name for name, pattern in _KINDS.items() if re.search(pattern, path)), "other")
        one = found.setdefault(kind, Traffic())
        one.num_requests += 1
        received = request["received_bytes"] if request["status"] is not None else 0
        is_known = one.read_bytes is not None and received is not None
        one.read_bytes = (one.read_bytes or 0) + int(str(received)) if is_known else None
        one.written_bytes += int(str(request["sent_bytes"]))
    return found


def weight_facts(layout: Regions, run: str, iterations: int) -> list[dict[str, Any]]:
    """Return, for every policy version and region, what is stored there and what of it crossed the link from home."""
    home = layout.home
    facts = []
    for region in layout.regions[1:]:
        crossed: Counter[tuple[str, ...]] = Counter()
        for way in layout.ways_out(region.name):
            if way.peer == home.name:
                crossed += bytes_read(layout, way, _POLICY)
        for version in range(iterations + 1):
            policy = resolve_policy(store_of(home), run, version)
            sizes = {part.name: part.size for part in policy.manifest.parts}
            read = {name: size for (number, name), size in crossed.items() if number == str(version)}
            facts.append(
                {
                    "region": region.name, "version": version, "bytes": sizes, "crossed_bytes": read,
                    "form_in_region": _form(store_of(region), run, version, policy.weights_hash),
                }
            )  # fmt: skip
    return facts


def rollout_facts(layout: Regions, run: str, iterations: int) -> list[dict[str, Any]]:
    """Return, for every iteration and region, the rows that lie there, who made them, and bytes read from elsewhere."""
    facts = []
    for region in layout.regions:
        store = store_of(region)
        elsewhere: Counter[str] = Counter()
        for way in layout.ways_out(region.name):
            for (number,), size in bytes_read(layout, way, _ROWS).items():
                elsewhere[number] += size
        for iteration in range(iterations):
            makers = Counter(row["region"] for row in rows_in(store, run, iteration, ["region"]))
            facts.append(
                {
                    "region": region.name, "iteration": iteration, "rows_by_maker": dict(makers),
                    "bytes_read_elsewhere": elsewhere[str(iteration)],
                }
            )  # fmt: skip
    return facts


def rows_in(store: Store, run: str, iteration: int, columns: list[str]) -> list[dict[str, Any]]:
    """Return columns of the rollouts of an iteration that lie in one region's store."""
    parts = [part for manifest in _shards(store, run, iteration) for part in manifest.parts]
    return [row for part in parts for row in read_table(store, part, Family.ROLLOUTS, columns).to_pylist()]


def _shards(store: Store, run: str, iteration: int) -> list[Manifest]:
    """Return the committed shards of an iteration that lie in a store: any of its numbers may be elsewhere."""
    found = (find_shard(store, run, iteration, shard) for shard in range(_MOST_SHARDS))
    return [manifest for manifest in found if manifest is not None]


def _form(store: Store, run: str, version: int, weights_hash: str) -> str | None:
    """Return how a region holds a version: whole, delta, adapter, or not at all; None also for other weights."""
    try:
        policy = resolve_policy(store, run, version)
    except ObjectMissingError:
        return None
    if policy.weights_hash != weights_hash:
        return None
    if policy.adapter is not None:
        return "adapter"
    return "whole" if policy.is_whole else "delta"
