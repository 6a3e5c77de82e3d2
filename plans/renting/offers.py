"""The price list `motley.offers/1`: machines that can be rented, by type and region, and the links between regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import Field

from plans.errors import Fault, FaultKind
from plans.spec.cluster import NAME_PATTERN, Cluster, Links, Machine
from plans.spec.cluster_rules import cluster_faults, unknown_type_fault
from plans.spec.gpu_catalog import GPU_CATALOG, GpuType
from plans.spec.load import build, load_text
from plans.spec.model import SpecModel

#: Highest price of one GPU for one hour; sums of prices stay exact to the cent below it.
MOST_USD_PER_HOUR = 1e6


class MachineOffer(SpecModel):
    """Machines of one kind in one region."""

    name: str = Field(pattern=NAME_PATTERN)
    """Unique name; rented machines are called `<name>-<index>`."""
    region: str = Field(pattern=NAME_PATTERN)
    """Region that holds them."""
    gpu: str
    """GPU type, a name of the catalogue or of `gpu_types`."""
    gpus_per_machine: int = Field(ge=1, le=4096)
    """GPUs of one machine; machines are rented whole."""
    machines: int = Field(ge=1, le=512)
    """Machines that are available."""
    usd_per_hour: float | None = Field(default=None, ge=0, le=MOST_USD_PER_HOUR)
    """Price of one GPU for one hour; an offer without one is refused."""
    intra_gb_s: float | None = Field(default=None, gt=0)
    """Bandwidth between two GPUs of a machine, 1e9 bytes/s; required for more than one GPU."""

    @property
    def machine_usd_per_hour(self) -> float:
        """Price of one machine for one hour; 0 where no price is stated (such offers are refused)."""
        return (self.usd_per_hour or 0.0) * self.gpus_per_machine


class OfferList(SpecModel):
    """What can be rented."""

    format: Literal["motley.offers/1"] = "motley.offers/1"
    """Kind and version of the document."""
    name: str
    """Name for people."""
    gpu_types: dict[str, GpuType] = Field(default_factory=dict)
    """Types added to, or overriding, the built-in catalogue."""
    offers: tuple[MachineOffer, ...] = Field(min_length=1)
    """The offers."""
    links: Links = Links()
    """Links inside and between regions, as in a cluster."""

    def usd_per_hour(self, counts: Sequence[int]) -> float:
        """Return the price of so many machines of each offer."""
        return sum(count * offer.machine_usd_per_hour for count, offer in zip(counts, self.offers, strict=True))

    def cluster(self, counts: Sequence[int]) -> Cluster:
        """Return the cluster of so many machines of each offer, at least one in all; unused links are left out.

        The GPU types carry the list's price where all rented offers of a type agree on it.
        """
        rented = [(offer, index) for offer, count in zip(self.offers, counts, strict=True) for index in range(count)]
        machines = tuple(
            Machine(
                name=f"{offer.name}-{index}",
                region=offer.region,
                gpu=offer.gpu,
                count=offer.gpus_per_machine,
                intra_gb_s=offer.intra_gb_s,
            )
            for offer, index in rented
        )
        regions, names = {m.region for m in machines}, {m.name for m in machines}
        links = self.links.model_copy(
            update={
                "regions": tuple(link for link in self.links.regions if link.pair <= regions),
                "machines": tuple(link for link in self.links.machines if link.pair <= names),
            }
        )
        return Cluster(
            name=self.name, gpu_types=self._types([offer for offer, _ in rented]), machines=machines, links=links
        )

    def describe(self, counts: Sequence[int]) -> str:
        """Return the machines in words, such as `2 x virginia-a100 (8 x A100-40)`."""
        parts = [
            f"{count} x {offer.name} ({offer.gpus_per_machine} x {offer.gpu})"
            for count, offer in zip(counts, self.offers, strict=True)
            if count
        ]
        return " + ".join(parts)

    def _types(self, rented: Sequence[MachineOffer]) -> dict[str, GpuType]:
        prices: dict[str, set[float]] = {}
        for offer in rented:
            prices.setdefault(offer.gpu, set()).add(offer.usd_per_hour or 0.0)
        known: Mapping[str, GpuType] = {**GPU_CATALOG, **self.gpu_types}
        return {
            gpu: known[gpu].model_copy(update={"usd_per_hour": max(found)} if len(found) == 1 else {})
            for gpu, found in prices.items()
        }


def load_offers(text: str, source_name: str) -> OfferList:
    """Return the price list of a YAML or JSON text; raises SpecError with every fault."""
    return load_text(text, source_name, lambda document, name: build(OfferList, document, name, offer_faults))


def offer_faults(offers: OfferList) -> list[Fault]:
    """Return every rule that a price list breaks: prices, names, types, links."""
    faults = [*_price_faults(offers)]
    for index, offer in enumerate(offers.offers):
        faults += _single_faults(offers, index, offer)
    return faults or cluster_faults(offers.cluster([offer.machines for offer in offers.offers]))


def _price_faults(offers: OfferList) -> Iterator[Fault]:
    unpriced = {index: offer.name for index, offer in enumerate(offers.offers) if offer.usd_per_hour is None}
    if unpriced:
        yield Fault(
            field="offers",
            found=f"without usd_per_hour for {', '.join(unpriced.values())}",
            rule="every offer states the price of one GPU for one hour",
            remedy="add usd_per_hour to each of them",
            kind=FaultKind.MISSING,
            reads=tuple(f"offers[{index}].usd_per_hour" for index in unpriced),
        )


def _single_faults(offers: OfferList, index: int, offer: MachineOffer) -> Iterator[Fault]:
    place = f"offers[{index}]"
    if offer.name in [earlier.name for earlier in offers.offers[:index]]:
        yield Fault(
            field=f"{place}.name",
            found=repr(offer.name),
            rule="names of offers are unique",
            remedy="rename one of the two offers",
            kind=FaultKind.CONFLICT,
        )
    known = {**GPU_CATALOG, **offers.gpu_types}
    if offer.gpu not in known:
        yield unknown_type_fault(f"{place}.gpu", offer.gpu, sorted(known))
    if offer.gpus_per_machine > 1 and offer.intra_gb_s is None:
        yield Fault(
            field=f"{place}.intra_gb_s",
            found="missing",
            rule="a machine with more than one GPU needs intra_gb_s",
            remedy="add it",
            kind=FaultKind.MISSING,
        )
