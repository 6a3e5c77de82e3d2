"""Rules of a cluster document across its fields: names are unique and known, every pair of machines has a link."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from plans.errors import Fault, FaultKind
from plans.spec.cluster import Cluster, resolve_edge
from plans.spec.gpu_catalog import GPU_CATALOG


def cluster_faults(
    cluster: Cluster,
    known_machines: Iterable[str] = (),
    known_pairs: Iterable[frozenset[str]] = (),
    known_types: Iterable[str] = (),
) -> list[Fault]:
    """Return every cross-field fault of a cluster.

    Args:
        cluster: the document, field by field already valid.
        known_machines: machine names that exist although their entry could not be read, so that a link to one of
            them is not reported as a second fault.
        known_pairs: region pairs whose link exists although its entry could not be read.
        known_types: GPU types that the document describes although an entry of them could not be read.
    """
    return [
        *_machine_faults(cluster, frozenset(known_types)),
        *_link_name_faults(cluster, frozenset(known_machines)),
        *_missing_link_faults(cluster, frozenset(known_pairs)),
        *_store_faults(cluster),
    ]


def gpu_type_names(cluster: Cluster) -> tuple[str, ...]:
    """Return every GPU type name that a machine may use, sorted."""
    return tuple(sorted({*GPU_CATALOG, *cluster.gpu_types}))


def _store_faults(cluster: Cluster) -> Iterator[Fault]:
    regions = sorted({machine.region for machine in cluster.machines})
    for table, entries in (("links.stores_gbps", cluster.links.stores_gbps), ("storage", cluster.storage)):
        for region in entries:
            if region not in regions:
                yield Fault(
                    field=f"{table}.{region}",
                    found=repr(region),
                    kind=FaultKind.UNKNOWN_NAME,
                    rule=f"a store's region is one of {', '.join(regions)}",
                    remedy="correct the name or remove the entry",
                )


def _machine_faults(cluster: Cluster, described: frozenset[str]) -> Iterator[Fault]:
    seen: set[str] = set()
    known = gpu_type_names(cluster)
    for index, machine in enumerate(cluster.machines):
        if machine.name in seen:
            yield Fault(
                field=f"machines[{index}].name",
                found=repr(machine.name),
                kind=FaultKind.CONFLICT,
                rule="machine names are unique",
                remedy="rename one of the two machines",
            )
        seen.add(machine.name)
        if machine.gpu not in known and machine.gpu not in described:
            yield unknown_type_fault(f"machines[{index}].gpu", machine.gpu, known)


def unknown_type_fault(
    field: str, name: str, known: Sequence[str], remedy: str = "add the type with its numbers under gpu_types"
) -> Fault:
    """Return the fault of a GPU type that does not exist, with the types that the name probably means.

    Args:
        field: where it stands.
        name: the type.
        known: types that exist.
        remedy: what else can be done.
    """
    near = _near_types(name, known)
    hint = f"write {' or '.join(map(repr, near))}, or " if near else ""
    return Fault(
        field=field,
        found=repr(name),
        kind=FaultKind.UNKNOWN_NAME,
        rule=f"a GPU type is one of {', '.join(known)}",
        remedy=f"{hint}{remedy}",
    )


def _near_types(name: str, known: Sequence[str]) -> list[str]:
    """Return the types that a name probably means: those of its beginning (`A100`, `H100-SXM`), else the most like."""
    plain = _plain(name)
    begun = [each for each in known if plain and _plain(each).startswith(plain)]
    longer = [each for each in known if len(_plain(each)) > 2 and plain.startswith(_plain(each))]
    return begun or longer or difflib.get_close_matches(name, known, n=1, cutoff=0.5)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _link_name_faults(cluster: Cluster, known_machines: frozenset[str]) -> Iterator[Fault]:
    machine_names = known_machines | {m.name for m in cluster.machines}
    tables = (("regions", cluster.links.regions, None), ("machines", cluster.links.machines, machine_names))
    for table, links, allowed in tables:
        seen: set[frozenset[str]] = set()
        for index, link in enumerate(links):
            place = f"links.{table}[{index}].between"
            if link.pair in seen:
                yield Fault(
                    field=place,
                    found=str(list(link.between)),
                    kind=FaultKind.CONFLICT,
                    rule="a pair is named once (links are symmetric)",
                    remedy="remove one of the two",
                )
            seen.add(link.pair)
            unknown = [] if allowed is None else [name for name in link.between if name not in allowed]
            for name in unknown:
                yield Fault(
                    field=place,
                    found=repr(name),
                    kind=FaultKind.UNKNOWN_NAME,
                    rule="it names machines of this cluster",
                    remedy="correct the name or remove the link",
                )


def _missing_link_faults(cluster: Cluster, known_pairs: frozenset[frozenset[str]]) -> Iterator[Fault]:
    reported: set[tuple[str, ...]] = set()
    for a, b in combinations(cluster.machines, 2):
        if a.name == b.name or resolve_edge(cluster.links, a, b) is not None:
            continue
        if frozenset((a.region, b.region)) in known_pairs:
            continue
        if a.region != b.region:
            first, second = sorted((a.region, b.region))
            key: tuple[str, ...] = ("regions", first, second)
            what = f"no link between regions {first} and {second}"
            remedy = f"add {{between: [{first}, {second}], latency_ms: ..., bandwidth_gbps: ...}} or forbidden: true"
        else:
            kind = "same_zone" if a.zone_name == b.zone_name else "same_region"
            key = (kind,)
            what = f"no {kind} link for machines {a.name} and {b.name}"
            remedy = f"add links.{kind}: {{latency_ms: ..., bandwidth_gbps: ...}}"
        if key not in reported:
            reported.add(key)
            yield Fault(
                field=f"links.{key[0]}",
                found=what,
                kind=FaultKind.MISSING,
                remedy=remedy,
                rule="every pair of machines needs a link or a prohibition",
            )
