"""The cluster document `motley.cluster/1` and its numeric view.

Owns: machines, links between them, and the one answer to "latency and bandwidth between two GPUs". All links
depend only on the two machines, so the view holds machine-by-machine matrices (the diagonal is the link inside
the machine) and expands them to GPU-by-GPU matrices on demand. Cross-field rules
are in `plans.spec.cluster_rules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from plans.spec.gpu_catalog import GPU_CATALOG, GpuType
from plans.spec.model import SpecModel, fingerprint
from plans.units import gb_s_to_bytes_per_s, gbps_to_bytes_per_s, ms_to_s

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
ADDRESS_PATTERN = r"^[A-Za-z0-9:][A-Za-z0-9.:_-]*$"
PATTERNS = MappingProxyType({
    NAME_PATTERN: "a name begins with a letter or digit and holds letters, digits, '.', '_' and '-' only",
    ADDRESS_PATTERN: "an address is a host name or an IP address",
})  # fmt: skip
"""What the patterns ask for, in words."""

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Machine(SpecModel):
    """One machine: one worker, one Airflow queue, GPUs of one type."""

    name: str = Field(pattern=NAME_PATTERN)
    """Unique name; GPU ids are `<name>/<index>`."""
    region: str = Field(pattern=NAME_PATTERN)
    """Region that holds the machine."""
    zone: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Zone inside the region; absent = the region is one zone."""
    gpu: str
    """GPU type, a name of the catalogue or of `gpu_types`."""
    count: int = Field(ge=1, le=4096)
    """Number of GPUs."""
    intra_gb_s: float | None = Field(default=None, gt=0)
    """Bandwidth between two GPUs of this machine, 1e9 bytes/s; required when `count` > 1."""
    intra_latency_ms: float = Field(default=0.0, ge=0)
    """One-way latency between two GPUs of this machine."""
    queue: str | None = None
    """Airflow queue; absent = the machine's name."""
    address: str | None = Field(default=None, pattern=ADDRESS_PATTERN)
    """Host name or IP address at which the other machines reach this one, and on which it listens to them; training
    spreads over several machines only where all have one. No part of what plans depend on."""
    rendezvous_port: int | None = Field(default=None, ge=1024, le=65535)
    """Port at which the ranks of a gang meet when this machine leads it; absent = one that is free."""

    @field_validator("address")
    @classmethod
    def _is_one_address(cls, value: str | None) -> str | None:
        if value in ("0.0.0.0", "::"):
            raise ValueError("it must be one address of this machine, not all of them")
        return value

    @model_validator(mode="after")
    def _needs_intra_link(self) -> Self:
        if self.count > 1 and self.intra_gb_s is None:
            raise ValueError("a machine with more than one GPU needs intra_gb_s")
        return self

    @property
    def zone_name(self) -> str:
        """Zone, or the region where none is named."""
        return self.zone if self.zone is not None else self.region

    @property
    def queue_name(self) -> str:
        """Airflow queue, or the machine's name where none is named."""
        return self.queue if self.queue is not None else self.name

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """Ids of the machine's GPUs, in index order."""
        return tuple(f"{self.name}/{index}" for index in range(self.count))


class LinkRate(SpecModel):
    """Latency and bandwidth of one class of links, in one direction."""

    latency_ms: float = Field(ge=0)
    """One-way latency."""
    bandwidth_gbps: float = Field(gt=0)
    """Bandwidth of one direction, 1e9 bits/s."""


class PairLink(SpecModel):
    """A symmetric link between two named places, or the statement that there is none."""

    between: tuple[str, str]
    """The two names."""
    latency_ms: float | None = Field(default=None, ge=0)
    """One-way latency."""
    bandwidth_gbps: float | None = Field(default=None, gt=0)
    """Bandwidth of one direction, 1e9 bits/s."""
    transfer_gbps: float | None = Field(default=None, gt=0)
    """Of a link between regions: most that one stage process may move over it between object stores, 1e9 bits/s; absent
    = as much as it gives. No part of what plans depend on."""
    forbidden: Literal[True] | None = None
    """`true` = no direct connection; then no other number is given."""

    @model_validator(mode="after")
    def _rate_or_forbidden(self) -> Self:
        numbers = (self.latency_ms, self.bandwidth_gbps)
        if self.forbidden and (*numbers, self.transfer_gbps) != (None, None, None):
            raise ValueError("a forbidden link has neither latency_ms nor bandwidth_gbps nor transfer_gbps")
        if not self.forbidden and None in numbers:
            raise ValueError("a link needs latency_ms and bandwidth_gbps, or `forbidden: true`")
        if self.between[0] == self.between[1]:
            raise ValueError("a link joins two different names")
        return self

    @property
    def pair(self) -> frozenset[str]:
        """The two names, without order."""
        return frozenset(self.between)


class Links(SpecModel):
    """All links between machines, by closeness and by exception."""

    same_zone: LinkRate | None = None
    """Machine to machine inside a zone."""
    same_region: LinkRate | None = None
    """Machine to machine between zones of a region."""
    regions: tuple[PairLink, ...] = ()
    """Links between regions."""
    machines: tuple[PairLink, ...] = ()
    """Overrides between two machines."""
    stores_gbps: dict[str, float] = Field(default_factory=dict)
    """Most that the store of a region gives all its readers together, 1e9 bits/s (> 0), by region; absent = as much as
    the readers' own links take. Decides the fan-out of new weights, no part of what placements depend on."""

    @field_validator("stores_gbps")
    @classmethod
    def _gives_something(cls, value: dict[str, float]) -> dict[str, float]:
        if slow := [region for region, rate in value.items() if not rate > 0]:
            raise ValueError(f"the rate of {', '.join(slow)} must be above 0")
        return value

    @cached_property
    def region_pairs(self) -> Mapping[frozenset[str], PairLink]:
        """Links between regions, by unordered pair."""
        return {link.pair: link for link in self.regions}

    @cached_property
    def machine_pairs(self) -> Mapping[frozenset[str], PairLink]:
        """Overrides between machines, by unordered pair."""
        return {link.pair: link for link in self.machines}


@dataclass(frozen=True, slots=True)
class Edge:
    """A resolved link: seconds and bytes per second; a forbidden one has infinite latency and no bandwidth."""

    latency_s: float
    bytes_per_s: float


FORBIDDEN = Edge(latency_s=float("inf"), bytes_per_s=0.0)


class ClusterView:
    """Arrays over the GPUs of a cluster, in document order (machine by machine, index by index)."""

    def __init__(self, cluster: Cluster) -> None:
        """Build machine-level arrays; GPU-by-GPU matrices are expanded on first use."""
        machines = cluster.machines
        types = [cluster.gpu_type(m.gpu) for m in machines]
        counts = [m.count for m in machines]
        self.machine_names = tuple(m.name for m in machines)
        self.region_names = tuple(dict.fromkeys(m.region for m in machines))
        self.zone_names = tuple(dict.fromkeys(f"{m.region}/{m.zone_name}" for m in machines))
        self.type_names = tuple(dict.fromkeys(m.gpu for m in machines))
        self.gpu_ids: tuple[str, ...] = tuple(gpu_id for m in machines for gpu_id in m.gpu_ids)
        self.gpu_index: Mapping[str, int] = MappingProxyType({gpu: i for i, gpu in enumerate(self.gpu_ids)})
        self.num_gpus = len(self.gpu_ids)
        self.machine_of: IntArray = _frozen_int(np.repeat(np.arange(len(machines)), counts))
        region_of_machine = [self.region_names.index(m.region) for m in machines]
        zone_of_machine = [self.zone_names.index(f"{m.region}/{m.zone_name}") for m in machines]
        type_of_machine = [self.type_names.index(m.gpu) for m in machines]
        self.region_of_machine: IntArray = _frozen_int(np.array(region_of_machine))
        self.zone_of_machine: IntArray = _frozen_int(np.array(zone_of_machine))
        self.region_of: IntArray = _frozen_int(self.region_of_machine[self.machine_of])
        self.zone_of: IntArray = _frozen_int(self.zone_of_machine[self.machine_of])
        self.type_of: IntArray = _frozen_int(np.array(type_of_machine)[self.machine_of])
        self.compute_flop_per_s = self._per_gpu([t.compute_flop_per_s for t in types])
        self.hbm_bytes_per_s = self._per_gpu([t.hbm_bytes_per_s for t in types])
        self.memory_bytes = self._per_gpu([t.memory_bytes for t in types])
        self.reserve_bytes = self._per_gpu([t.reserve_bytes for t in types])
        self.usd_per_hour = self._per_gpu([t.usd_per_hour for t in types])
        self.machine_latency_s, self.machine_bytes_per_s, self.machine_s_per_byte = _machine_matrices(cluster)

    def _per_gpu(self, per_machine: list[float]) -> FloatArray:
        return _frozen(np.array(per_machine, dtype=np.float64)[self.machine_of])

    def _expand(self, matrix: FloatArray, diagonal: float) -> FloatArray:
        expanded = matrix[np.ix_(self.machine_of, self.machine_of)]
        np.fill_diagonal(expanded, diagonal)
        return _frozen(expanded)

    @cached_property
    def alpha_s(self) -> FloatArray:
        """One-way latency between GPUs [N, N]; infinite where forbidden, 0 on the diagonal."""
        return self._expand(self.machine_latency_s, 0.0)

    @cached_property
    def beta_bytes_per_s(self) -> FloatArray:
        """Bandwidth between GPUs [N, N]; 0 where forbidden, infinite on the diagonal."""
        return self._expand(self.machine_bytes_per_s, np.inf)

    @cached_property
    def s_per_byte(self) -> FloatArray:
        """Inverse bandwidth [N, N]; 0 where forbidden (the latency is infinite there) and on the diagonal."""
        return self._expand(self.machine_s_per_byte, 0.0)

    def edge(self, gpu_a: int, gpu_b: int) -> Edge:
        """Return the link between two GPUs, by index; a GPU reaches itself at no cost."""
        if gpu_a == gpu_b:
            return Edge(latency_s=0.0, bytes_per_s=float("inf"))
        a, b = self.machine_of[gpu_a], self.machine_of[gpu_b]
        return Edge(latency_s=float(self.machine_latency_s[a, b]), bytes_per_s=float(self.machine_bytes_per_s[a, b]))

    def indices(self, gpu_ids: Iterable[str]) -> IntArray:
        """Return the indices of GPU ids; raises KeyError for an id that the cluster does not have."""
        return np.array([self.gpu_index[gpu] for gpu in gpu_ids], dtype=np.int64)


class Cluster(SpecModel):
    """A set of machines, their GPUs and the links between them."""

    format: Literal["motley.cluster/1"] = "motley.cluster/1"
    """Kind and version of the document."""
    name: str
    """Name for people; not part of the fingerprint."""
    gpu_types: dict[str, GpuType] = Field(default_factory=dict)
    """Types added to, or overriding, the built-in catalogue."""
    machines: tuple[Machine, ...] = Field(min_length=1)
    """The machines."""
    links: Links = Links()
    """Links between machines."""
    storage: dict[str, str] = Field(default_factory=dict)
    """Object-store root of each region; absent = one root for all."""

    def gpu_type(self, name: str) -> GpuType:
        """Return a GPU type by exact name, the document's own types first."""
        return self.gpu_types[name] if name in self.gpu_types else GPU_CATALOG[name]

    @cached_property
    def view(self) -> ClusterView:
        """Arrays over the GPUs."""
        return ClusterView(self)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what prices and placements depend on: types used, machines, resolved rules of the links."""
        return fingerprint(self._content())

    def _content(self) -> dict[str, object]:
        used = sorted({m.gpu for m in self.machines})
        links = self.links.model_dump(mode="json", exclude={"stores_gbps"})
        for table in ("regions", "machines"):
            for link in links[table]:
                link["between"] = sorted(link["between"])
                del link["transfer_gbps"]
            links[table].sort(key=lambda link: link["between"])
        not_priced = {"queue", "address", "rendezvous_port"}
        machines = [m.model_dump(mode="json", exclude=not_priced) | {"zone": m.zone_name} for m in self.machines]
        return {
            "format": self.format,
            "gpu_types": {name: self.gpu_type(name).model_dump(mode="json") for name in used},
            "machines": sorted(machines, key=lambda m: str(m["name"])),
            "links": links,
        }


def resolve_edge(links: Links, a: Machine, b: Machine) -> Edge | None:
    """Return the link between two different machines: override, then zone, region, region pair; None if missing."""
    override = links.machine_pairs.get(frozenset((a.name, b.name)))
    if override is not None:
        return _pair_edge(override)
    if a.region != b.region:
        between = links.region_pairs.get(frozenset((a.region, b.region)))
        return None if between is None else _pair_edge(between)
    rate = links.same_zone if a.zone_name == b.zone_name else links.same_region
    return None if rate is None else _rate_edge(rate.latency_ms, rate.bandwidth_gbps)


def single_machine(gpu: str, count: int, *, name: str = "local", intra_gb_s: float = 64.0) -> Cluster:
    """Return the cluster of one machine with `count` GPUs of a catalogue type (`cpu` for CPU workers)."""
    machine = Machine(name=name, region="local", gpu=gpu, count=count, intra_gb_s=intra_gb_s)
    return Cluster(name=name, machines=(machine,))


def _pair_edge(link: PairLink) -> Edge:
    if link.latency_ms is None or link.bandwidth_gbps is None:
        return FORBIDDEN
    return _rate_edge(link.latency_ms, link.bandwidth_gbps)


def _rate_edge(latency_ms: float, bandwidth_gbps: float) -> Edge:
    return Edge(latency_s=ms_to_s(latency_ms), bytes_per_s=gbps_to_bytes_per_s(bandwidth_gbps))


def _machine_matrices(cluster: Cluster) -> tuple[FloatArray, FloatArray, FloatArray]:
    count = len(cluster.machines)
    latency, rate = np.zeros((count, count)), np.zeros((count, count))
    for i, a in enumerate(cluster.machines):
        latency[i, i] = ms_to_s(a.intra_latency_ms)
        rate[i, i] = np.inf if a.intra_gb_s is None else gb_s_to_bytes_per_s(a.intra_gb_s)
        for j in range(i + 1, count):
            b = cluster.machines[j]
            edge = resolve_edge(cluster.links, a, b)
            if edge is None:
                raise KeyError(f"no link between {a.name} and {b.name}")
            latency[i, j] = latency[j, i] = edge.latency_s
            rate[i, j] = rate[j, i] = edge.bytes_per_s
    inverse = np.divide(1.0, rate, out=np.zeros_like(rate), where=rate > 0)
    return _frozen(latency), _frozen(rate), _frozen(inverse)


def _frozen(array: FloatArray) -> FloatArray:
    array.setflags(write=False)
    return array


def _frozen_int(array: IntArray) -> IntArray:
    array.setflags(write=False)
    return array
