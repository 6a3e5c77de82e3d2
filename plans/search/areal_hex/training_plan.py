"""Phase 1a: training (and the inference of its side) on the training GPUs (AReaL-Hex).

Degrees are enumerated. A TP group lies in one machine and a DP group, the ranks that hold the same stage, on one GPU
type; only the pipeline crosses types. So every replica has the same sequence of types, layers go to stages by their
compute, and equal sequence counts per replica are the greedy packing for the mean lengths that a plan knows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plans.cost.compact import CompactTask, GpuGrid
from plans.cost.evaluator import PlanEvaluator
from plans.search.balancing import TaskRates, share_samples
from plans.search.degrees import pp_degrees, tp_degrees
from plans.search.layouts import LayerSplit
from plans.search.machine_order import MachineOrder
from plans.search.problem import Problem
from plans.spec.llm import LlmShape
from plans.workflow import RlTask, TaskKind, shape_of

Unit = tuple[int, ...]

#: Placements of each task that are combined.
KEPT = 10
#: Combinations whose memory is checked, cheapest first.
MOST_COMBINATIONS = 300


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement of one task with what it costs alone."""

    seconds: float
    share: float
    """Largest share of a GPU's memory that its model fills."""
    task: CompactTask


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Placements of all tasks but generation, on the training GPUs."""

    tasks: Mapping[RlTask, CompactTask]
    seconds: float
    """Inference and training after each other: what the consumer side takes."""


class TrainingPlanner:
    """Makes training plans for the GPUs left per machine."""

    def __init__(self, problem: Problem, *, dp_across_types: bool = False) -> None:
        """Prepare the unit costs of every task; `dp_across_types` lifts the rule for DP groups."""
        self._problem, self._dp_across_types = problem, dp_across_types
        self._evaluator: PlanEvaluator = problem.evaluator
        self._tasks: tuple[RlTask, ...] = tuple(
            task for task in problem.workflow.tasks if task is not RlTask.ACTOR_GENERATION
        )
        self._micro_batch = problem.job.training.micro_batch_size
        self._rates = {task: TaskRates(problem.evaluator, task, self._mbs(task)) for task in self._tasks}
        self._order: MachineOrder = problem.order
        self._known: dict[tuple[int, ...], TrainingPlan | None] = {}

    def plan(self, gpus: Sequence[int]) -> TrainingPlan | None:
        """Return the fastest placement found whose memory fits; None where none does."""
        key = tuple(gpus)
        if key not in self._known:
            self._known[key] = self._combined(key) if gpus else None
        return self._known[key]

    def _combined(self, gpus: tuple[int, ...]) -> TrainingPlan | None:
        choices = [self._choices(task, gpus) for task in self._tasks]
        if not all(choices):
            return None
        order = sorted(
            itertools.product(*(range(len(c)) for c in choices)),
            key=lambda at: (sum(c[i].seconds for c, i in zip(choices, at, strict=True)), at),
        )
        leanest = tuple(min(range(len(c)), key=lambda i, c=c: (c[i].share, i)) for c in choices)  # type: ignore[misc]  # mypy cannot type the default argument
        for at in [*order[:MOST_COMBINATIONS], leanest]:
            chosen = [c[i] for c, i in zip(choices, at, strict=True)]
            tasks: dict[RlTask, CompactTask] = {
                task: placed.task for task, placed in zip(self._tasks, chosen, strict=True)
            }
            if self._evaluator.memory.group_memory(self._tasks, tasks).overflow_bytes <= 0.0:
                return TrainingPlan(tasks, sum(placed.seconds for placed in chosen))
        return None

    def _choices(self, task: RlTask, gpus: tuple[int, ...]) -> list[Placed]:
        twin = next(
            t
            for t in self._tasks
            if (t.kind, t.has_scalar_head, self._shape(t)) == (task.kind, task.has_scalar_head, self._shape(task))
        )
        makes = self._training_grids if task.kind is TaskKind.TRAINING else self._inference_grids
        found: dict[object, Placed] = {}
        for grid in makes(twin, gpus):
            placed = self._placed(twin, grid)
            if placed is not None:
                found.setdefault(placed.task.key, placed)
        return _pareto(list(found.values()))

    def _placed(self, task: RlTask, grid: GpuGrid) -> Placed | None:
        total = self._problem.job.num_samples
        rates = self._rates[task]
        layers = rates.layers(grid, LayerSplit.SPEED)
        if layers is None:
            return None
        base, extra = divmod(total, grid.shape[0])
        samples = tuple(base + (index < extra) for index in range(grid.shape[0]))
        placement = CompactTask(grid, layers, samples, self._mbs(task))
        if grid.shape[0] > 1:
            placement = self._balanced(task, placement)
        seconds = self._evaluator.task_s(task, placement)
        share = rates.resident_share(placement.gpus, layers)
        return Placed(seconds, share, placement) if math.isfinite(seconds) and share <= 1.0 else None

    def _balanced(self, task: RlTask, even: CompactTask) -> CompactTask:
        unit_s = [
            self._evaluator.replica_s(task, even, index, samples) / samples
            for index, samples in enumerate(even.samples)
        ]
        if not math.isfinite(max(unit_s)) or max(unit_s) <= min(unit_s) * (1.0 + 1e-9):
            return even
        samples = share_samples(self._problem.job.num_samples, unit_s)
        return CompactTask(even.gpus, even.layers, samples, even.micro_batch_size)

    def _training_grids(self, task: RlTask, gpus: tuple[int, ...]) -> Iterator[GpuGrid]:
        """Yield placements [dp, pp, tp] with TP in a machine and every stage on one GPU type."""
        least = self._problem.least_shards(task)
        most_pp, most_dp = self._shape(task).layers, self._problem.job.num_samples
        for members in self._subsets(gpus):
            for tp in self._tps(task, members):
                by_type = self._units_by_type(members, tp)
                for types in _orders(list(by_type)):
                    for dp in _useful_dps([len(by_type[t]) for t in types]):
                        stages = [len(by_type[t]) // dp for t in types]
                        pp = sum(stages)
                        if min(stages) < 1 or pp > most_pp or pp * tp < least or dp > most_dp:
                            continue
                        yield _grid([by_type[t] for t in types], stages, dp, stage_blocks=True)
                        if dp > 1 and pp > 1:
                            yield _grid([by_type[t] for t in types], stages, dp, stage_blocks=False)

        if self._dp_across_types:
            yield from self._mixed_grids(task, gpus)

    def _mixed_grids(self, task: RlTask, gpus: tuple[int, ...]) -> Iterator[GpuGrid]:
        """Yield placements whose replicas are blocks of units along the machines, on the strongest types together."""
        for tp in self._tps(task, gpus):
            by_type = list(self._units_by_type(gpus, tp).values())
            for count in range(2, len(by_type) + 1):
                yield from self._block_grids(task, tp, [unit for found in by_type[:count] for unit in found])

    def _block_grids(self, task: RlTask, tp: int, units: Sequence[Unit]) -> Iterator[GpuGrid]:
        least = self._problem.least_shards(task)
        for pp in pp_degrees(self._shape(task), len(units), most=8):
            dp = min(len(units) // pp, self._problem.job.num_samples)
            if pp * tp >= least and dp > 0:
                yield np.array(units[: dp * pp], dtype=np.int32).reshape(dp, pp, tp)

    def _inference_grids(self, task: RlTask, gpus: tuple[int, ...]) -> Iterator[GpuGrid]:
        """Yield placements of forward passes: replicas need no common type, since they exchange nothing."""
        least = self._problem.least_shards(task)
        for tp in self._tps(task, gpus):
            units = [unit for found in self._units_by_type(gpus, tp).values() for unit in found]
            first = max(1, math.ceil(least / tp))
            for pp in (first, first + 1, 2 * first, 4 * first):
                dp = min(len(units) // pp, self._problem.job.num_samples) if pp <= self._shape(task).layers else 0
                if dp > 0:
                    yield np.array(units[: dp * pp], dtype=np.int32).reshape(dp, pp, tp)

    def _subsets(self, gpus: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return all GPUs, then each region's alone where there are several, strongest first."""
        view = self._problem.view
        by_region: dict[int, list[int]] = {}
        for gpu in gpus:
            by_region.setdefault(int(view.region_of[gpu]), []).append(gpu)
        strength = {r: float(view.compute_flop_per_s[members].sum()) for r, members in by_region.items()}
        ranked = sorted(by_region, key=lambda r: (-strength[r], self._order.region_chain_rank[r]))
        alone = [tuple(by_region[r]) for r in ranked[:2]] if len(ranked) > 1 else []
        return [gpus, *alone]

    def _tps(self, task: RlTask, gpus: Sequence[int]) -> list[int]:
        counts = np.bincount(self._problem.view.machine_of[list(gpus)])
        return [tp for tp in tp_degrees(self._shape(task), int(counts.max())) if tp & (tp - 1) == 0]

    def _units_by_type(self, gpus: Sequence[int], tp: int) -> dict[int, list[Unit]]:
        """Return sets of `tp` GPUs of one machine by GPU type, along the machine order; strongest type first."""
        view, order = self._problem.view, self._order
        per_machine: dict[int, list[int]] = {}
        for gpu in gpus:
            per_machine.setdefault(int(view.machine_of[gpu]), []).append(gpu)

        def place(machine: int) -> tuple[float, ...]:
            region = order.region_chain_rank[int(view.region_of_machine[machine])]
            return (-float(order.compute[machine]), float(region), float(order.chain_rank[machine]))

        units: dict[int, list[Unit]] = {}
        for machine in sorted(per_machine, key=place):
            members = per_machine[machine]
            cut = [tuple(members[i : i + tp]) for i in range(0, len(members) - tp + 1, tp)]
            if cut:
                units.setdefault(int(view.type_of[members[0]]), []).extend(cut)
        return units

    def _mbs(self, task: RlTask) -> int:
        return self._micro_batch if task.kind is TaskKind.TRAINING else 1

    def _shape(self, task: RlTask) -> LlmShape:
        return shape_of(self._problem.job, task)


def _orders(types: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every set of types, strongest first along the pipeline, and the same reversed."""
    for count in range(len(types), 0, -1):
        for chosen in itertools.combinations(types, count):
            yield chosen
            if count > 1:
                yield chosen[::-1]


def _useful_dps(counts: Sequence[int]) -> list[int]:
    """Return the largest dp of every distinct sequence of stage counts: a smaller one only idles units."""
    largest: dict[tuple[int, ...], int] = {}
    for dp in range(1, min(counts) + 1):
        largest[tuple(count // dp for count in counts)] = dp
    return sorted(largest.values())


def _grid(units: Sequence[Sequence[Unit]], stages: Sequence[int], dp: int, *, stage_blocks: bool) -> GpuGrid:
    """Return [dp, pp, tp]: consecutive units form a stage over all replicas, or a replica's stages of one type."""
    columns: list[list[Unit]] = []
    for found, count in zip(units, stages, strict=True):
        columns += [
            [found[j * dp + i] if stage_blocks else found[i * count + j] for i in range(dp)] for j in range(count)
        ]
    return np.ascontiguousarray(np.array(columns, dtype=np.int32).transpose(1, 0, 2))


def _pareto(entries: list[Placed]) -> list[Placed]:
    """Return the fastest, and of the slower ones those that need less memory than every faster one."""
    kept: list[Placed] = []
    least = math.inf
    for position, entry in enumerate(sorted(entries, key=lambda e: (e.seconds, e.share))):
        if position < KEPT // 2 or entry.share < least * 0.98:
            kept.append(entry)
        least = min(least, entry.share)
    return kept[:KEPT]
