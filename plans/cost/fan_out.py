"""How the machines of a region read a new version from their store: in which order, and how many at once.

A reader gets its own link's rate, or an equal share of what the store gives all readers together, whichever is less.
Readers go in waves of ``at_once``. After its read a machine generates, so whoever generates longest reads first (the
rule of the largest delivery time, which is best for one server), and the price of a choice is when the last machine has
generated. Reading shared is the choice unless fewer readers at once are clearly cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plans.cost.model import CostModel
from plans.cost.price import generation_s_by_machine
from plans.cost.transfer import CLEARLY_LESS, WeightLine
from plans.plan import FanOut, Plan
from plans.spec.cluster import Cluster
from plans.spec.job import Job
from plans.units import gbps_to_bytes_per_s
from plans.workflow import RlTask, shape_of


def fan_outs(cluster: Cluster, job: Job, plan: Plan, model: CostModel) -> dict[str, FanOut]:
    """Return the cheapest fan-out of each region with several generating machines and a store of known rate.

    Args:
        cluster: The machines; ``links.stores_gbps`` says what a store gives.
        job: The job.
        plan: Its placement.
        model: Prices generation, and says which share of the bytes moves.
    """
    rates = cluster.links.stores_gbps
    busy_s = generation_s_by_machine(cluster, job, plan, model) if rates else {}
    line = WeightLine.of(shape_of(job, RlTask.ACTOR_TRAINING), job.weight_bytes_per_parameter)
    num_bytes = line.total_bytes * model.delta_fraction
    found = {}
    for region, rate in rates.items():
        here = {machine.name: busy_s[machine.name] for machine in cluster.machines
                if machine.region == region and machine.name in busy_s}  # fmt: skip
        if len(here) > 1:
            own = _reader_rates(cluster, sorted(here))
            found[region] = cheapest_fan_out(here, own, gbps_to_bytes_per_s(rate), num_bytes)
    return found


def cheapest_fan_out(
    busy_s: Mapping[str, float], reader_bytes_per_s: Mapping[str, float], store_bytes_per_s: float, num_bytes: float
) -> FanOut:
    """Return order and readers at once with the earliest end of all machines' generation.

    Args:
        busy_s: Seconds that each machine generates once it has the weights.
        reader_bytes_per_s: What each machine's own link takes.
        store_bytes_per_s: What the store gives all readers together.
        num_bytes: Bytes that each machine reads.
    """
    order = sorted(busy_s, key=lambda machine: (-busy_s[machine], machine))
    best: tuple[float, FanOut] | None = None
    for at_once in range(len(order), 0, -1):
        ends_s, read_s = _price(order, at_once, busy_s, reader_bytes_per_s, store_bytes_per_s, num_bytes)
        if best is None or ends_s < best[0] * CLEARLY_LESS:
            best = ends_s, FanOut(order=tuple(order), at_once=at_once, read_s=read_s)
    if best is None:
        raise ValueError("a fan-out needs machines")
    return best[1]


def _price(
    order: Sequence[str],
    at_once: int,
    busy_s: Mapping[str, float],
    reader_bytes_per_s: Mapping[str, float],
    store_bytes_per_s: float,
    num_bytes: float,
) -> tuple[float, float]:
    """Return when the last machine has generated, and the longest read; seconds."""
    now_s = ends_s = slowest_s = 0.0
    for first in range(0, len(order), at_once):
        wave = order[first : first + at_once]
        share = store_bytes_per_s / len(wave)
        reads_s = {machine: num_bytes / min(share, reader_bytes_per_s[machine]) for machine in wave}
        ends_s = max(ends_s, *(now_s + read_s + busy_s[machine] for machine, read_s in reads_s.items()))
        now_s, slowest_s = now_s + max(reads_s.values()), max(slowest_s, *reads_s.values())
    return ends_s, slowest_s


def _reader_rates(cluster: Cluster, names: Sequence[str]) -> dict[str, float]:
    """Return what each machine's own link takes: that to the nearest other machine of its region."""
    view = cluster.view
    places = [view.machine_names.index(name) for name in names]
    return {
        name: max(float(view.machine_bytes_per_s[place, other]) for other in places if other != place)
        for name, place in zip(names, places, strict=True)
    }
