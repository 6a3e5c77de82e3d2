"""Baseline: verl's mapping (HybridFlow, Algorithms 1 and 2; hetrl.md 12.4), which does not see which GPU is which.

Every partition of the models into co-located sets, every allocation of GPUs from the memory minimum, and per model the
degrees that a simulator of a homogeneous cluster likes best. That cluster has the same machines, with a mean GPU, the
smallest memory and the fastest link everywhere. Ranks are placed in file order with equal layers and samples. The
chosen placement is then priced with the real cost model like every other method's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import ClassVar

from plans.search.arms import unit_of
from plans.search.balancing import Balancing
from plans.search.degrees import pp_degrees, tp_degrees
from plans.search.genome import Genome
from plans.search.groupings import Grouping, set_partitions
from plans.search.layouts import TaskLayout
from plans.search.outcome import outcome_of
from plans.search.problem import Problem
from plans.search.protocol import Outcome
from plans.search.run import Incumbent, SearchRun
from plans.search.tools import SearchTools
from plans.spec.cluster import Cluster, LinkRate, Links
from plans.spec.gpu_catalog import GpuType
from plans.spec.job import Mode
from plans.workflow import RlTask, TaskKind, shape_of

#: Largest TP degree (one machine), as in HybridFlow.
MAX_TP = 8
#: Simulated placements kept for the real price: the first feasible one in simulated order is the answer.
KEPT = 256
#: Most groups of GPUs per allocation before units get coarser.
MAX_UNITS = 16


@dataclass(frozen=True, slots=True, order=True)
class _Simulated:
    """A placement with its simulated seconds; ordered by them, then by discovery."""

    seconds: float
    index: int
    grouping: Grouping
    sizes: tuple[int, ...]


class _BlindView:
    """The homogeneous cluster that verl believes in, and the best degrees of each task on n of its GPUs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = Problem(_homogeneous(problem.cluster), problem.job, problem.model)
        self._best: dict[tuple[RlTask, int, tuple[RlTask, ...]], tuple[float, TaskLayout | None]] = {}
        self.simulations = 0

    @cached_property
    def tools(self) -> SearchTools:
        """Pricing on the homogeneous cluster, without load balancing."""
        return SearchTools(self.problem, Balancing.none())

    def best(self, task: RlTask, count: int, companions: tuple[RlTask, ...]) -> tuple[float, TaskLayout | None]:
        """Return (seconds, layout on GPUs 0..count-1) of a task in a set of co-located tasks."""
        key = (task, count, companions)
        if key not in self._best:
            self._best[key] = self._search(task, count, companions)
        return self._best[key]

    def _search(self, task: RlTask, count: int, companions: tuple[RlTask, ...]) -> tuple[float, TaskLayout | None]:
        shape = shape_of(self.problem.job, task)
        held = sum(self.problem.resident_bytes[other] for other in companions if other is not task) / count
        budget = self.problem.resident_bytes[task] / sum(self.problem.resident_bytes[other] for other in companions)
        best: tuple[float, TaskLayout | None] = (float("inf"), None)
        for tp in tp_degrees(shape, min(MAX_TP, count)):
            for pp in pp_degrees(shape, count // tp):
                dp = min(count // (tp * pp), self.problem.job.num_samples)
                layout = TaskLayout(dp, pp, tp, tuple(range(dp * pp * tp)))
                seconds, share = self.tools.pricer.task_s(task, layout, held)
                self.simulations += 1
                if share <= budget and seconds < best[0]:
                    best = (seconds, layout)
        return best


@dataclass(frozen=True)
class VerlPlanner:
    """verl's scheduler."""

    name: ClassVar[str] = "verl"

    def search(self, problem: Problem, run: SearchRun) -> Outcome:
        """Return the placement that verl would choose, if it fits the real GPUs; else its next choice."""
        blind = _BlindView(problem)
        tools = SearchTools(problem, Balancing.none())
        incumbent: Incumbent[Genome] = Incumbent(run)
        for choice in self._ranked(problem, blind, run):
            genome = _genome(blind, choice)
            price = tools.pricer.price(genome)
            if price.is_feasible:
                incumbent.offer(price.score_s, genome)
                break
        return outcome_of(problem, tools, incumbent, self.name)

    @staticmethod
    def _ranked(problem: Problem, blind: _BlindView, run: SearchRun) -> list[_Simulated]:
        """Return the best simulated placements within the budget, best first."""
        kept: list[tuple[float, int, _Simulated]] = []
        for index, (grouping, sizes) in enumerate(_allocations(problem)):
            before = blind.simulations
            seconds = _simulate(blind, grouping, sizes)
            # Simulated prices count: they are this method's evaluations.
            run.meter.spend_at_most(max(1, (blind.simulations - before) // len(problem.workflow.tasks)))
            if seconds < float("inf"):
                heapq.heappush(kept, (-seconds, -index, _Simulated(seconds, index, grouping, sizes)))
                if len(kept) > KEPT:
                    heapq.heappop(kept)
            if run.meter.is_spent and kept:
                break
        return sorted(entry for _, _, entry in kept)


def _simulate(blind: _BlindView, grouping: Grouping, sizes: Sequence[int]) -> float:
    """Return Sum over phases of max over sets of the sum inside (HybridFlow's d_cost); async: the slower side."""
    phases = dict.fromkeys(TaskKind, 0.0)
    for kind in TaskKind:
        per_set = [
            sum(blind.best(task, size, tasks)[0] for task in tasks if task.kind is kind)
            for tasks, size in zip(grouping, sizes, strict=True)
        ]
        phases[kind] = max(per_set)
    rest = phases[TaskKind.INFERENCE] + phases[TaskKind.TRAINING]
    if blind.problem.workflow.mode is Mode.ASYNC:
        return max(phases[TaskKind.GENERATION], rest)
    return phases[TaskKind.GENERATION] + rest


def _allocations(problem: Problem) -> Iterator[tuple[Grouping, tuple[int, ...]]]:
    """Yield placements of models (an actor's tasks stay together in sync mode) with every allocation of GPUs."""
    total = problem.view.num_gpus
    unit = max(unit_of(total), total // MAX_UNITS, 1)
    for grouping in _model_groupings(problem):
        minimum = [problem.least_gpus(tasks) for tasks in grouping]
        units = total // unit
        if units < len(grouping):
            continue
        for cuts in combinations(range(1, units), len(grouping) - 1):
            edges = (0, *cuts, units)
            sizes = [(b - a) * unit for a, b in pairwise(edges)]
            sizes[-1] += total - units * unit
            if all(size >= low for size, low in zip(sizes, minimum, strict=True)):
                yield grouping, tuple(sizes)


def _model_groupings(problem: Problem) -> list[Grouping]:
    """Return the partitions of models as task groupings; in async mode the rollout engine is a model of its own."""
    tasks = problem.workflow.tasks
    is_async = problem.workflow.mode is Mode.ASYNC
    rollout = RlTask.ACTOR_GENERATION
    roles = list(dict.fromkeys(task.role for task in tasks if not (is_async and task is rollout)))
    found = []
    for partition in set_partitions(roles):
        groups = [
            tuple(task for task in tasks if task.role in block and not (is_async and task is rollout))
            for block in partition
        ]
        found.append(((rollout,), *groups) if is_async else tuple(groups))
    return found


def _genome(blind: _BlindView, choice: _Simulated) -> Genome:
    """Return the placement in file order: each set takes the next GPUs."""
    gpus, layouts, start = [], {}, 0
    for tasks, size in zip(choice.grouping, choice.sizes, strict=True):
        gpus.append(tuple(range(start, start + size)))
        for task in tasks:
            layout = blind.best(task, size, tasks)[1]
            if layout is not None:
                shifted = tuple(gpu + start for gpu in layout.gpus)
                layouts[task] = TaskLayout(layout.dp, layout.pp, layout.tp, shifted)
        start += size
    return Genome(choice.grouping, tuple(gpus), {t: layouts[t] for t in blind.problem.workflow.tasks})


def _homogeneous(cluster: Cluster) -> Cluster:
    view = cluster.view
    mean = GpuType(
        memory_gb=float((view.memory_bytes - view.reserve_bytes).min()) / 1e9,
        tflops=float(view.compute_flop_per_s.mean()) / 1e12,
        hbm_gb_s=float(view.hbm_bytes_per_s.mean()) / 1e9,
        usd_per_hour=0.0,
        reserve_gb=0.0,
    )
    fastest = max((m.intra_gb_s or 1.0 for m in cluster.machines), default=1.0)
    rates = [rate.bandwidth_gbps for rate in (cluster.links.same_zone, cluster.links.same_region) if rate is not None]
    rates += [link.bandwidth_gbps for link in cluster.links.regions if link.bandwidth_gbps is not None]
    link = LinkRate(latency_ms=0.0, bandwidth_gbps=max(rates, default=fastest * 8.0))
    machines = tuple(
        machine.model_copy(update={"gpu": "mean", "region": "one", "zone": None, "intra_gb_s": fastest})
        for machine in cluster.machines
    )
    return Cluster(name="blind", gpu_types={"mean": mean}, machines=machines, links=Links(same_zone=link))
