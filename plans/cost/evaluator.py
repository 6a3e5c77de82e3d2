"""Fast pricing of compact plans for searches: the same numbers as `price`, with everything kept that recurs.

What is kept: per task and placement its cost and memory; per group and contents its memory outcome; per replica (a
row of machines with layers) its seconds per unit of work. Changing one task of a plan re-prices that task only, and
replicas on machines that were seen before need little more than a look-up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from plans.cost.cache import BoundedCache, entries_for
from plans.cost.collectives import LinkTimes
from plans.cost.compact import CompactPlan, CompactTask
from plans.cost.fast_memory import FastMemory
from plans.cost.fast_task import FastTaskPricer
from plans.cost.fast_transfer import FastTransfer
from plans.cost.iteration import PhaseTimes, combine
from plans.cost.lineup import Lineup, Lineups
from plans.cost.model import CostModel
from plans.cost.price import link_times
from plans.cost.terms import TaskTerms, build_terms
from plans.cost.transfer import WeightLine
from plans.spec.cluster import Cluster, ClusterView
from plans.spec.job import Job
from plans.workflow import RlTask, shape_of, workflow_of


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Price of a compact plan."""

    iteration_s: float
    """Seconds per iteration by the model, whether or not memory suffices; infinite over a forbidden link."""
    overflow_bytes: float
    """Bytes lacking, summed over GPUs, with one sequence's cache counted where not even that fits."""
    phases: PhaseTimes
    """Seconds of the phases."""
    task_s: Mapping[RlTask, float]
    """Seconds per task."""
    decode_batches: tuple[int, ...]
    """Decode batch per generation replica."""
    decode_rooms: tuple[int, ...]
    """Most sequences that fit together, per generation replica, capped by max_num_seqs; 0 = none."""

    @property
    def feasible(self) -> bool:
        """Whether memory and links allow the plan."""
        return self.overflow_bytes <= 0.0 and math.isfinite(self.iteration_s)

    @property
    def score_s(self) -> float:
        """`iteration_s` when feasible, infinite otherwise: what a search minimises."""
        return self.iteration_s if self.feasible else math.inf


class PlanEvaluator:
    """Prices compact plans of one cluster, job and model. Not safe to share between threads."""

    def __init__(self, cluster: Cluster, job: Job, model: CostModel) -> None:
        self.cluster = cluster
        self.job = job
        self.model = model
        self.view = cluster.view
        self.tasks = workflow_of(job).tasks
        self.links: LinkTimes = link_times(self.view, model)
        self.terms = {task: build_terms(self.view, job, task, model) for task in self.tasks}
        self.memory = FastMemory(self.view, job)
        self.evaluations = 0
        line = WeightLine.of(shape_of(job, RlTask.ACTOR_TRAINING), job.weight_bytes_per_parameter)
        self._transfer = FastTransfer(line, self.view, self.links, model)
        self.lineups = Lineups(self.view.machine_of.tolist())
        self._pricers = _shared_pricers(self.view, self.links, self.terms)
        self._costs: BoundedCache[Hashable, float] = BoundedCache(entries_for(self.view.num_gpus))
        self._transfers: BoundedCache[Hashable, float] = BoundedCache(entries_for(self.view.num_gpus))

    def evaluate(self, plan: CompactPlan) -> Evaluation:
        """Return the price of a plan; its tasks must be exactly those of the job."""
        self.evaluations += 1
        overflow, batches, rooms = self._memory_of(plan)
        task_s, phases = self._times_of(plan, batches)
        return Evaluation(phases.iteration_s, overflow, phases, task_s, batches, rooms)

    def score(self, plan: CompactPlan) -> tuple[float, float]:
        """Return `score_s` and `overflow_bytes` of the evaluation; a plan that memory forbids needs no times."""
        self.evaluations += 1
        overflow, batches, _ = self._memory_of(plan)
        if overflow > 0.0:
            return math.inf, overflow
        return self._times_of(plan, batches)[1].iteration_s, overflow

    def _memory_of(self, plan: CompactPlan) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
        """Return bytes lacking, and batch and room of each generation replica."""
        overflow = 0.0
        batches: tuple[int, ...] = ()
        rooms: tuple[int, ...] = ()
        for group in plan.groups:
            outcome = self.memory.group_memory(group, plan.tasks)
            overflow += outcome.overflow_bytes
            if outcome.decode_batches:
                batches, rooms = outcome.decode_batches, outcome.decode_rooms
        return overflow, batches, rooms

    def _times_of(self, plan: CompactPlan, batches: tuple[int, ...]) -> tuple[dict[RlTask, float], PhaseTimes]:
        """Return the seconds of each task, and of the phases."""
        tasks = plan.tasks
        task_s = {
            task: self.task_s(task, tasks[task], batches if task is RlTask.ACTOR_GENERATION else ())
            for task in self.tasks
        }
        moved_s = self.transfer_s(tasks[RlTask.ACTOR_TRAINING], tasks[RlTask.ACTOR_GENERATION])
        group_of = {task: index for index, group in enumerate(plan.groups) for task in group}
        return task_s, combine(self.job.mode, task_s, group_of, moved_s, self.model.eta)

    def task_s(self, task: RlTask, placement: CompactTask, decode_batches: tuple[int, ...] = ()) -> float:
        """Return the seconds of one task on a placement; generation needs its decode batches."""
        pricer, lineup = self._pricers[task], placement.lineup(self.lineups)
        key = (pricer, lineup, placement.layers, placement.samples, placement.micro_batch_size, decode_batches)
        seconds = self._costs.get(key)
        if seconds is None:
            layers, mbs = placement.layers, placement.micro_batch_size
            seconds = pricer.task_s(lineup, layers, mbs, placement.samples, decode_batches)
            self._costs.put(key, seconds)
        return seconds

    def pricer_of(self, task: RlTask) -> FastTaskPricer:
        """Return the pricer of a task's replicas; tasks with equal constants share one."""
        return self._pricers[task]

    def lineup(self, placement: CompactTask) -> Lineup:
        """Return the machines of a placement's stages."""
        return placement.lineup(self.lineups)

    def replica_s(self, task: RlTask, placement: CompactTask, index: int, samples: int, decode_batch: int = 1) -> float:
        """Return the seconds of one replica with so many samples, without the gradient all-reduce."""
        row, mbs = self.lineup(placement).rows[index], placement.micro_batch_size
        return self._pricers[task].replica_s(row, placement.layers, mbs, placement.tp, samples, decode_batch)

    def stage_totals(
        self, task: RlTask, placement: CompactTask, index: int, decode_batch: int = 1
    ) -> tuple[float, ...]:
        """Return the seconds of each stage of one replica."""
        row, mbs, samples = self.lineup(placement).rows[index], placement.micro_batch_size, placement.samples[index]
        return self._pricers[task].stage_totals(row, placement.layers, mbs, placement.tp, samples, decode_batch)

    def transfer_s(self, training: CompactTask, generation: CompactTask) -> float:
        """Return C_reshard or C_sync between two placements."""
        key = (training.grid_key, generation.grid_key)
        seconds = self._transfers.get(key)
        if seconds is None:
            seconds = self._transfer.seconds(training, generation)
            self._transfers.put(key, seconds)
        return seconds


def _shared_pricers(
    view: ClusterView, links: LinkTimes, terms: Mapping[RlTask, TaskTerms]
) -> dict[RlTask, FastTaskPricer]:
    """Return a pricer per task, one for all tasks whose constants are equal (two inference tasks often are)."""
    pricers: dict[RlTask, FastTaskPricer] = {}
    for task, own in terms.items():
        twin = next((other for other in pricers if own.prices_like(terms[other])), None)
        pricers[task] = FastTaskPricer(view, links, own) if twin is None else pricers[twin]
    return pricers
