"""What stands where: regions with their servers and the links between them, as a document beside the running things.

A region's first machine shares the region's network with its server; each further one has a network of its own, joined
to the region's, through which it reaches everything else.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from plans.spec.cluster import Cluster
from stages.home import HOME_VARIABLE
from storage.store_options import options_variable

REPOSITORY = Path(__file__).parents[2]
"""Where the code is that runs in the regions."""

S3_PORT = 9000
"""Port of a region's server inside its own namespace."""

Mode = Literal["namespaces", "loopback"]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Place(_Document):
    """A network in which processes run, with a folder for what they leave."""

    name: str
    """Name in the cluster file."""
    namespace: str | None
    """Network namespace; None: the computer's own network."""
    folder: Path
    """Folder with the home, the logs and the journals."""


class Site(Place):
    """A machine with a network of its own: any but the first one of a region."""

    region: str
    """Its region."""


class Region(Place):
    """One region: where its first machine's processes run and where its store is; buckets lie in its folder."""

    root: str
    """Root of its store (s3://bucket/prefix)."""
    s3_port: int
    """Port of its S3 server."""
    key: str
    """Access key of its server."""
    secret: str
    """Secret key of its server."""

    @property
    def bucket(self) -> str:
        """Bucket of the root."""
        return self.root.removeprefix("s3://").partition("/")[0]


class Way(_Document):
    """One direction of asking: how a region or a site reaches the store of a region whose network it is not in."""

    asker: str
    """Region or site whose processes ask."""
    peer: str
    """Region whose server answers."""
    port: int
    """Port of the line's end in the asker's network."""
    peer_host: str
    """Address of the server, seen from the asker's network."""
    delay_ms: float
    """One-way delay."""
    gbps: float | None
    """Rate of each direction; None inside a region, where nothing limits it."""


class Regions(_Document):
    """All of it."""

    mode: Mode
    """`namespaces`: the kernel limits the rate of a pair of interfaces (tc tbf), proxies add the delay; `loopback`:
    proxies do both."""
    mark: str
    """Prefix of the names of namespaces and interfaces."""
    regions: tuple[Region, ...]
    """In the order of the cluster file; the first one is home."""
    sites: tuple[Site, ...] = ()
    """Machines with a network of their own."""
    ways: tuple[Way, ...]
    """Every ordered pair of a network and a region that is not in it."""
    airflow_ports: dict[str, int] = {}
    """Port at which a network finds Airflow on its own loopback interface, by name; home's own is not among them."""
    processes: tuple[tuple[int, float], ...] = ()
    """Servers and proxies: process id and start time."""

    def region(self, name: str) -> Region:
        """Return a region by name."""
        return next(region for region in self.regions if region.name == name)

    @property
    def places(self) -> tuple[Place, ...]:
        """All networks: those of the regions, then those of the sites."""
        return (*self.regions, *self.sites)

    def place(self, name: str) -> Place:
        """Return a region or a site by name."""
        return next(place for place in self.places if place.name == name)

    def region_of(self, place: Place) -> Region:
        """Return the region that a place is in."""
        return self.region(place.region if isinstance(place, Site) else place.name)

    def ways_out(self, region: str) -> list[Way]:
        """Return how the places of a region reach the stores of other regions."""
        return [w for w in self.ways if self.region_of(self.place(w.asker)).name == region != w.peer]

    @property
    def home(self) -> Region:
        """The home region."""
        return self.regions[0]

    def way(self, asker: str, peer: str) -> Way:
        """Return how a region or a site reaches a region's store."""
        return next(way for way in self.ways if (way.asker, way.peer) == (asker, peer))

    def journal(self, way: Way) -> Path:
        """Return the file with the requests that passed a line."""
        return self.place(way.asker).folder / f"requests-to-{way.peer}.jsonl"

    def storage_options(self, asker: str) -> dict[str, dict[str, object]]:
        """Return how the processes of a region or a site open every root: one beside them at once, others by a line."""
        ports = {way.peer: way.port for way in self.ways if way.asker == asker}
        return {
            f"s3://{region.bucket}": {
                "endpoint_url": f"http://127.0.0.1:{ports.get(region.name, region.s3_port)}",
                "key": region.key,
                "secret": region.secret,
                "client_kwargs": {"region_name": "us-east-1"},
            }
            for region in self.regions
        }

    def save(self, folder: Path) -> None:
        """Write the document; it holds secrets, so only its owner may read it."""
        file = document(folder)
        file.touch(mode=0o600)
        file.write_text(self.model_dump_json(indent=1), encoding="utf-8")


def document(folder: Path) -> Path:
    """Return the file that says what runs."""
    return folder / "regions.json"


def load(folder: Path) -> Regions | None:
    """Return what runs, None if nothing does."""
    file = document(folder)
    return Regions.model_validate(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def home_of(place: Place) -> Path:
    """Return MOTLEY_HOME of a region or a site."""
    return place.folder / "motley"


def environment(layout: Regions, place: Place) -> dict[str, str]:
    """Return what a process of a region or a site has in its environment beside what it inherits."""
    options = options_variable(layout.storage_options(place.name))
    return {HOME_VARIABLE: str(home_of(place)), "PYTHONPATH": str(REPOSITORY), **options}


def planned(cluster: Cluster, folder: Path, mode: Mode) -> Regions:
    """Return the regions of a cluster file, before anything runs.

    Raises:
        ValueError: a region has no s3 root, two regions have no link, or a machine has the name of a region.
    """
    mark = f"mr{os.getpid() % 100_000}"
    names = list(dict.fromkeys(machine.region for machine in cluster.machines))
    ports = iter(free_ports(len(names) * len(cluster.machines)))
    regions: list[Region] = []
    for name in names:
        root = cluster.storage.get(name, "")
        if not root.startswith("s3://"):
            raise ValueError(f"cluster {cluster.name}: storage of region {name} is {root!r}, an s3:// root is needed")
        regions.append(
            Region(
                name=name,
                root=root,
                namespace=f"{mark}-{name}" if mode == "namespaces" else None,
                s3_port=S3_PORT if mode == "namespaces" else next(ports),
                key=f"key-{name}",
                secret=secrets.token_hex(16),
                folder=folder / name,
            )
        )
    ways = [way for pair in enumerate(combinations(names, 2)) for way in _ways(cluster, *pair, regions, mode, ports)]
    sites = _sites(cluster, folder, mode, mark)
    inner = [way for at, site in enumerate(sites) for way in _ways_of_site(site, at, regions, ways, mode, ports)]
    return Regions(mode=mode, mark=mark, regions=tuple(regions), sites=tuple(sites), ways=(*ways, *inner))


def _sites(cluster: Cluster, folder: Path, mode: Mode, mark: str) -> list[Site]:
    firsts = {machine.region: machine.name for machine in reversed(cluster.machines)}
    found = []
    for machine in cluster.machines:
        if machine.name == firsts[machine.region]:
            continue
        if machine.name in firsts:
            raise ValueError(f"cluster {cluster.name}: machine {machine.name} has the name of a region; rename it")
        namespace = f"{mark}-{machine.name}" if mode == "namespaces" else None
        found.append(Site(name=machine.name, region=machine.region, namespace=namespace, folder=folder / machine.name))
    return found


def _ways_of_site(
    site: Site, number: int, regions: Sequence[Region], ways: Sequence[Way], mode: Mode, ports: Iterator[int]
) -> list[Way]:
    """Return how a site reaches its own region's store, and those of others as its region does."""
    found = []
    for place, region in enumerate(regions):
        port = S3_PORT + 1 + place if mode == "namespaces" else next(ports)
        if region.name != site.region:
            way = next(way for way in ways if (way.asker, way.peer) == (site.region, region.name))
            found.append(way.model_copy(update={"asker": site.name, "port": port}))
        elif mode == "namespaces":
            host = f"{site_net(number)}.1"
            found.append(Way(asker=site.name, peer=region.name, port=port, peer_host=host, delay_ms=0.0, gbps=None))
    return found


def site_net(number: int) -> str:
    """Return the network between a site and its region: the region has address 1, the site 2."""
    return f"10.78.{number}"


def _ways(
    cluster: Cluster, number: int, pair: tuple[str, str], regions: Sequence[Region], mode: Mode, ports: Iterator[int]
) -> list[Way]:
    link = cluster.links.region_pairs.get(frozenset(pair))
    if link is None or link.latency_ms is None or link.bandwidth_gbps is None:
        raise ValueError(f"cluster {cluster.name}: regions {' and '.join(pair)} have no link")
    found = []
    for asker, peer, end in ((*pair, 2), (*reversed(pair), 1)):
        place = next(i for i, region in enumerate(regions) if region.name == peer)
        port = S3_PORT + 1 + place if mode == "namespaces" else next(ports)
        host = f"10.77.{number}.{end}" if mode == "namespaces" else "127.0.0.1"
        found.append(
            Way(
                asker=asker, peer=peer, port=port, peer_host=host,
                delay_ms=link.latency_ms, gbps=link.bandwidth_gbps,
            )
        )  # fmt: skip
    return found


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody has now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
