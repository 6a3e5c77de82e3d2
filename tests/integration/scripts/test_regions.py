"""Regions on this computer: servers of their own, lines with the delay and rate of the cluster file, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from plans.spec.cluster import Cluster
from scripts.regions.layout import Mode, Place, Regions, document, environment, load, planned
from scripts.regions.network import inside, start, stop, usable_mode
from scripts.regions.tcp_proxy import requests_of

pytestmark = pytest.mark.timeout(900)

DELAY_MS, GBPS = 40.0, 0.05
SIZE = 2_000_000
TRANSFER = f"""
import json, os, time
from storage.store import open_store
store = open_store("s3://rl-BUCKET/runs")
began = time.monotonic()
store.publish("r/object", bytes({SIZE}))
written = time.monotonic()
assert len(store.read_bytes("r/object")) == {SIZE}
print(json.dumps([written - began, time.monotonic() - written]))
"""


@pytest.fixture(params=["namespaces", "loopback"])
def mode(request: pytest.FixtureRequest) -> Mode:
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    wanted: Mode = request.param
    if wanted == "namespaces" and usable_mode() != wanted:
        pytest.skip("this process may not create network namespaces")
    return wanted


def cluster(*regions: str, further: tuple[str, ...] = ()) -> Cluster:
    """Return a machine in each region, and further ones in the first."""
    machines = [(f"{name}-0", name) for name in regions] + [(name, regions[0]) for name in further]
    pairs = [(a, b) for place, a in enumerate(regions) for b in regions[place + 1 :]]
    return Cluster.model_validate(
        {
            "name": "test",
            "machines": [{"name": name, "region": region, "gpu": "cpu", "count": 1} for name, region in machines],
            "links": {"regions": [{"between": p, "latency_ms": DELAY_MS, "bandwidth_gbps": GBPS} for p in pairs]},
            "storage": {name: f"s3://rl-{name}/runs" for name in regions},
        }
    )


def seconds(layout: Regions, place: Place, region: str = "b") -> tuple[float, float]:
    """Return how long a place takes to write and to read an object of a region."""
    script = TRANSFER.replace("BUCKET", region)
    done = subprocess.run(
        inside(place, [sys.executable, "-c", script]), env={**os.environ, **environment(layout, place)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    write_s, read_s = json.loads(done.stdout)
    return write_s, read_s


def test_line_has_the_delay_and_the_rate_of_the_cluster_file(tmp_path: Path, mode: Mode) -> None:
    layout = start(planned(cluster("a", "b"), tmp_path, mode), tmp_path)
    try:
        assert load(tmp_path) == layout
        assert document(tmp_path).stat().st_mode & 0o077 == 0
        far = seconds(layout, layout.region("a"))
        floor_s = SIZE * 8 / (GBPS * 1e9) + 2 * DELAY_MS / 1e3
        # A token bucket lets its first bytes through at once.
        assert min(far) > 0.8 * floor_s
        passed = requests_of(layout.journal(layout.ways[0]))
        asked = {(line["method"], str(line["path"]).partition("?")[0]) for line in passed}
        assert asked >= {("PUT", "/rl-b/runs/r/object"), ("GET", "/rl-b/runs/r/object")}
        count = len(passed)
        seconds(layout, layout.region("b"))
        assert len(requests_of(layout.journal(layout.ways[0]))) == count  # its own store is no way to go
    finally:
        stop(layout, tmp_path)
    assert not document(tmp_path).exists()
    assert [pid for pid, _ in layout.processes if psutil.pid_exists(pid) and _is_alive(pid)] == []
    assert (
        layout.mark not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    )


def test_three_regions_reach_each_other_only_over_their_links(tmp_path: Path, mode: Mode) -> None:
    layout = start(planned(cluster("a", "b", "c"), tmp_path, mode), tmp_path)
    try:
        assert len(layout.ways) == 6
        for name in ("a", "c"):
            seconds(layout, layout.region(name))
            way = next(w for w in layout.ways if (w.asker, w.peer) == (name, "b"))
            assert requests_of(layout.journal(way)) != []
    finally:
        stop(layout, tmp_path)


def test_further_machine_has_a_network_of_its_own_and_shares_its_regions_link(tmp_path: Path, mode: Mode) -> None:
    layout = start(planned(cluster("a", "b", further=("a-1", "a-2")), tmp_path, mode), tmp_path)
    try:
        assert [place.name for place in layout.places] == ["a", "b", "a-1", "a-2"]
        site = layout.place("a-1")
        far, near = seconds(layout, site), seconds(layout, site, "a")
        floor_s = SIZE * 8 / (GBPS * 1e9) + 2 * DELAY_MS / 1e3
        assert min(far) > 0.8 * floor_s
        assert min(near) < floor_s / 2
        assert [way.asker for way in layout.ways_out("a")] == ["a", "a-1", "a-2"]
        assert requests_of(layout.journal(layout.way("a-1", "b"))) != []
        assert requests_of(layout.journal(layout.way("a", "b"))) == []
        if mode == "namespaces":
            assert len({place.namespace for place in layout.places}) == 4
    finally:
        stop(layout, tmp_path)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    assert layout.mark not in listed


def test_machine_with_the_name_of_a_region_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="machine b has the name of a region"):
        planned(cluster("a", "b", further=("b",)), tmp_path, "loopback")


def test_cluster_without_a_link_or_an_s3_root_is_refused(tmp_path: Path) -> None:
    lonely = cluster("a", "b").model_copy(update={"storage": {"a": "s3://a/x"}})
    with pytest.raises(ValueError, match="storage of region b is '', an s3:// root is needed"):
        planned(lonely, tmp_path, "loopback")


def _is_alive(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.05)  # a killed process is about to go
    return True
