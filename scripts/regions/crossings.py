"""What a run over several regions left: which rows lie where, and what of the policies crossed which link."""

from __future__ import annotations

import re
from collections import Counter
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

_POLICY: Final = re.compile(r"/policies/(\d+)/[^/]+/(.+)")
_MOST_SHARDS: Final = 64
"""Shards looked for in a region."""
_ROWS: Final = re.compile(r"/iterations/(\d+)/.*\.parquet")


def store_of(region: Region) -> Store:
    """Return a region's store by its server's own folder: also readable when the server is down."""
    return open_store(str(region.folder / "s3" / region.root.removeprefix("s3://")))


def bytes_read(layout: Regions, way: Way, pattern: re.Pattern[str]) -> Counter[tuple[str, ...]]:
    """Return the bytes asked for over a line, by what a pattern finds in the object's path."""
    found: Counter[tuple[str, ...]] = Counter()
    peer = layout.region(way.peer)
    for request in requests_of(layout.journal(way)):
        path = str(request["path"]).partition("?")[0]
        match = pattern.search(path)
        if request["method"] == "GET" and match is not None:
            length = request["length"]
            whole = peer.folder / "s3" / path.lstrip("/")
            found[match.groups()] += int(str(length)) if length is not None else whole.stat().st_size
    return found


def weight_facts(layout: Regions, run: str, iterations: int) -> list[dict[str, Any]]:
    """Return, for every policy version and region, what is stored there and what of it crossed the link from home."""
    home = layout.regions[0]
    facts = []
    for region in layout.regions[1:]:
        way = next(w for w in layout.ways if (w.asker, w.peer) == (region.name, home.name))
        crossed = bytes_read(layout, way, _POLICY)
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
        for way in layout.ways:
            if way.asker == region.name:
                for (number,), size in bytes_read(layout, way, _ROWS).items():
                    elsewhere[number] += size
        for iteration in range(iterations):
            makers: Counter[str] = Counter()
            for manifest in _shards(store, run, iteration):
                for part in manifest.parts:
                    makers += Counter(read_table(store, part, Family.ROLLOUTS, ["region"])["region"].to_pylist())
            facts.append(
                {
                    "region": region.name, "iteration": iteration, "rows_by_maker": dict(makers),
                    "bytes_read_elsewhere": elsewhere[str(iteration)],
                }
            )  # fmt: skip
    return facts


def _shards(store: Store, run: str, iteration: int) -> list[Manifest]:
    """Return the committed shards of an iteration that lie in a store: any of its numbers may be elsewhere."""
    found = (find_shard(store, run, iteration, shard) for shard in range(_MOST_SHARDS))
    return [manifest for manifest in found if manifest is not None]


def _form(store: Store, run: str, version: int, weights_hash: str) -> str | None:
    """Return how a region holds a version: whole, delta, or not at all; None also for other weights."""
    try:
        policy = resolve_policy(store, run, version)
    except ObjectMissingError:
        return None
    if policy.weights_hash != weights_hash:
        return None
    return "whole" if policy.is_whole else "delta"
