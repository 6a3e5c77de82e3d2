"""The `areal-hex` method: plans for a split (phase 1) and the split (phase 2), in turns, priced by the cost model.

The window delta(eta) of the paper averages costs over steps; the cost model's iteration is that average already, so
there is nothing to grow. Staleness does not enter: the run-time enforces it, and balanced sides keep it low.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import JsonValue

from plans.cost.transfer import WeightLine, transfer_s
from plans.plan import Plan
from plans.search.areal_hex.alternation import Alternation, Round, SplitCost
from plans.search.areal_hex.document import plan_document
from plans.search.areal_hex.machine_classes import MachineClass, machine_classes
from plans.search.areal_hex.rollout_plan import RolloutPlan, RolloutPlanner
from plans.search.areal_hex.settings import ArealHexSettings, SyncPlace
from plans.search.areal_hex.splits import Split, SplitTable
from plans.search.areal_hex.training_plan import TrainingPlan, TrainingPlanner
from plans.search.problem import Problem
from plans.search.protocol import Outcome
from plans.search.run import Incumbent, SearchRun
from plans.workflow import RlTask, shape_of

#: Share of the iteration that the weight update must take before a split is bent to it.
WORTH_SAVING = 0.002
#: Least GPUs per replica that are tried against a slow weight update.
REPLICA_GPUS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class BothSides:
    """Plans of both sides of a split."""

    training: TrainingPlan
    rollout: RolloutPlan
    update_s: float
    """Seconds of the weight update between them."""

    @property
    def iteration_s(self) -> float:
        """What the cost model charges: the slower side, then the update."""
        return max(self.training.seconds, self.rollout.seconds) + self.update_s


@dataclass(frozen=True)
class ArealHexPlanner:
    """AReaL-Hex's scheduler."""

    name: ClassVar[str] = "areal-hex"
    settings: ArealHexSettings = field(default_factory=ArealHexSettings)
    """Which repairs are on."""

    def search(self, problem: Problem, run: SearchRun) -> Outcome:
        """Return the best plan over the splits that the alternation visits."""
        work = SplitPricer(problem, run, self.settings)
        return work.outcome(work.alternation.run())


class SplitPricer:
    """Phase 1 for any split, with the incumbent."""

    def __init__(self, problem: Problem, run: SearchRun, settings: ArealHexSettings) -> None:
        """Build the planners of both sides and the table of splits."""
        self._problem, self._run, self._settings = problem, run, settings
        self._classes: tuple[MachineClass, ...] = machine_classes(problem.view)
        self._training = TrainingPlanner(problem, dp_across_types=settings.dp_across_types)
        self.rollout = RolloutPlanner(problem.evaluator, self._classes, settings)
        self._line = WeightLine.of(shape_of(problem.job, RlTask.ACTOR_TRAINING), problem.job.weight_bytes_per_parameter)
        self._incumbent: Incumbent[BothSides] = Incumbent(run)
        self._sides: dict[Split, BothSides] = {}
        self._table = SplitTable(problem.view, self._classes, mean_bandwidth=settings.mean_bandwidth)
        self.alternation = Alternation(self._table, settings, self.cost, lambda: run.meter.is_spent)
        """The outer loop over this pricer's splits."""

    @property
    def rounds(self) -> list[Round]:
        """What the bisection did."""
        return self.alternation.rounds

    def cost(self, split: Split) -> SplitCost:
        """Return what the best plan found on a split costs; counts one evaluation."""
        self._run.meter.spend()
        view = self._problem.view
        training = self._training.plan(split.training_gpus(view))
        free: dict[int, list[int]] = {}
        for gpu in split.rollout_gpus(view):
            free.setdefault(int(view.machine_of[gpu]), []).append(gpu)
        rollout = self.rollout.plan(free) if free else None
        if training is None or rollout is None:
            return SplitCost(
                training_s=math.inf if training is None else training.seconds,
                rollout_s=math.inf if rollout is None else rollout.seconds,
                objective_s=math.inf,
            )
        sides = BothSides(training, rollout, self._update_s(training, rollout))
        if self._settings.fanout_aware and self._may_gain(sides):
            sides = self._with_idle_machines(self._with_larger_replicas(sides, free), free)
        return self._offered(split, sides)

    def sides(self, split: Split) -> BothSides | None:
        """Return the plans of a split that was priced; None where it cannot run."""
        return self._sides.get(split)

    def outcome(self, chosen: Split | None) -> Outcome:
        """Return the outcome: the plan of the chosen split; of the best one where the best are kept."""
        sides = self._sides.get(chosen) if chosen is not None else None
        if self._settings.keep_best and sides is not None:
            sides = self._incumbent.best
        plan: Plan | None = None
        facts: dict[str, JsonValue] = {}
        if sides is not None:
            plan = plan_document(self._problem, sides.training.tasks, sides.rollout)
            split = next(split for split, found in self._sides.items() if found is sides)
            facts = {"training_compute_fraction": self._table.share_of(split)}
        trace = tuple(entry for entry in self._incumbent.trace if sides is not None and entry[2] >= sides.iteration_s)
        return Outcome(plan=plan, trace=trace, termination=self._run.meter.termination, facts=facts)

    def _offered(self, split: Split, sides: BothSides) -> SplitCost:
        settings = self._settings
        rollout_s = sides.rollout.seconds
        if settings.sync_place is SyncPlace.IN_ROLLOUT and settings.fanout_aware:
            rollout_s += sides.update_s
        slower_s = max(sides.training.seconds, rollout_s)
        outside = settings.sync_place is SyncPlace.OUTSIDE and settings.fanout_aware
        objective_s = slower_s + (sides.update_s if outside else 0.0)
        if math.isinf(sides.iteration_s):
            objective_s = math.inf
        else:
            self._sides[split] = sides
            self._incumbent.offer(sides.iteration_s, sides)
        return SplitCost(training_s=sides.training.seconds, rollout_s=rollout_s, objective_s=objective_s)

    def _update_s(self, training: TrainingPlan, rollout: RolloutPlan) -> float:
        actor = training.tasks[RlTask.ACTOR_TRAINING]
        slots = [list(zip(actor.layers, stages, strict=True)) for stages in actor.stages]
        evaluator = self._problem.evaluator
        return transfer_s(self._line, evaluator.view, evaluator.links, self._problem.model, slots, rollout.slots)

    def _may_gain(self, sides: BothSides) -> bool:
        """Tell whether less weight update could make this split the best: neither side gets faster by it."""
        floor_s = max(sides.training.seconds, sides.rollout.seconds)
        return floor_s < self._incumbent.best_s and sides.update_s > WORTH_SAVING * sides.iteration_s

    def _with_larger_replicas(self, sides: BothSides, free: dict[int, list[int]]) -> BothSides:
        """Use fewer, larger replicas while the update gains more than generation loses."""
        for least_gpus in REPLICA_GPUS:
            rollout = self.rollout.plan(free, least_gpus)
            if rollout is None:
                break
            tried = BothSides(sides.training, rollout, self._update_s(sides.training, rollout))
            if tried.iteration_s < sides.iteration_s * (1.0 - 1e-9):
                sides = tried
        return sides

    def _with_idle_machines(self, sides: BothSides, free: dict[int, list[int]]) -> BothSides:
        """Leave rollout machines idle, all of a class or one, while the update gains more than generation loses."""
        left, least_gpus = dict(free), min(r.configuration.shape.num_gpus for r in sides.rollout.replicas)
        improved = True
        while improved:
            improved = False
            for drop in self._drops(left):
                fewer = {machine: gpus for machine, gpus in left.items() if machine not in drop}
                rollout = self.rollout.plan(fewer, least_gpus) if fewer else None
                if rollout is None:
                    continue
                tried = BothSides(sides.training, rollout, self._update_s(sides.training, rollout))
                if tried.iteration_s < sides.iteration_s * (1.0 - 1e-9):
                    sides, left, improved = tried, fewer, True
                    break
        return sides

    def _drops(self, left: dict[int, list[int]]) -> list[frozenset[int]]:
        drops: list[frozenset[int]] = []
        for members in self._classes:
            here = [machine for machine in members.machines if machine in left]
            if here:
                drops += [frozenset(here), frozenset(here[-1:])]
        return list(dict.fromkeys(drops))
