"""Candidate -> balanced compact plan -> price. The only door from the search to the cost model."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from plans.cost.compact import CompactPlan, CompactTask, PackedPlan, read_only_grid
from plans.cost.evaluator import Evaluation, PlanEvaluator
from plans.search.balancing import SPLIT_NUMBERS, Balancing
from plans.search.genome import Genome
from plans.search.guesses import ARRANGEMENTS, LayoutGuesses
from plans.search.layouts import Recipe, TaskLayout
from plans.search.limits import NO_LIMITS, Limits
from plans.search.ranked_layout import RankedLayout
from plans.spec.cluster import IntArray
from plans.workflow import RlTask, TaskKind

#: Layouts of which is kept whether an engine can run them.
CACHE_ENTRIES = 20_000


class Price(NamedTuple):
    """Rank of a candidate: cheaper first, and among the infeasible ones the less overfull first."""

    score_s: float
    """Seconds per iteration; infinite when infeasible."""
    overflow_bytes: float
    """Bytes lacking, summed over GPUs."""

    @property
    def is_feasible(self) -> bool:
        """Whether the candidate can run."""
        return math.isfinite(self.score_s)


UNPLACEABLE = Price(math.inf, math.inf)


class Pricer:
    """Balances and prices candidates of one problem; counts what it prices."""

    def __init__(self, evaluator: PlanEvaluator, balancing: Balancing, limits: Limits = NO_LIMITS) -> None:
        """Keep the evaluator."""
        # Machine code is loaded when somebody searches, not when the package is imported.
        from plans.search.compiled import ranking, recipes

        self._ranking, self._num_recipe = ranking, recipes.NUM_RECIPE
        self._limits = limits
        self.evaluator = evaluator
        self.balancing = balancing
        self.count = 0
        mbs = evaluator.job.training.micro_batch_size
        self._micro_batch = {task: mbs if task.kind is TaskKind.TRAINING else 1 for task in evaluator.tasks}
        self._strategies = np.array(
            [balancing.generation_samples, balancing.other_samples, balancing.layers], dtype=np.int64
        )
        self._allows = lru_cache(maxsize=CACHE_ENTRIES)(self._allows_uncached)

    def price(self, genome: Genome) -> Price:
        """Return the rank of a candidate."""
        self.count += 1
        if self._limits and not self._is_allowed(genome):
            return UNPLACEABLE
        return Price(*self.evaluator.score_candidate(self._strategies, *self._packed(genome)))

    def evaluation(self, genome: Genome) -> Evaluation | None:
        """Return the whole price of a candidate; None where a task cannot be placed at all."""
        plan = self.compact(genome)
        return None if plan is None else self.evaluator.evaluate(plan)

    def compact(self, genome: Genome) -> CompactPlan | None:
        """Return the balanced placement of a candidate.

        None where a task has fewer layers or samples than parts, or where an engine can't run its layout.
        """
        if self._limits and not self._is_allowed(genome):
            return None
        shape, gpus = self._packed(genome)
        layouts = [genome.layouts[task] for task in self.evaluator.tasks]
        layers, samples = (
            np.empty(sum(sizes), dtype=np.int64)
            for sizes in ([layout.pp for layout in layouts], [layout.dp for layout in layouts])
        )
        if not self.evaluator.balance(self._strategies, PackedPlan(shape, gpus, layers, samples)):
            return None
        cuts, shares = iter(layers.tolist()), iter(samples.tolist())
        tasks = {
            task: CompactTask(
                read_only_grid(layout.gpus, layout.dp, layout.pp, layout.tp),
                tuple([next(cuts) for _ in range(layout.pp)]),
                tuple([next(shares) for _ in range(layout.dp)]),
                self._micro_batch[task],
            )
            for task, layout in zip(self.evaluator.tasks, layouts, strict=True)
        }
        return CompactPlan(groups=genome.grouping, tasks=tasks)

    def task_s(self, task: RlTask, layout: TaskLayout, held_bytes: float = 0.0) -> tuple[float, float]:
        """Return (seconds, largest share of a GPU's memory that stays resident) of one task alone.

        Args:
            task: the task.
            layout: its layout.
            held_bytes: bytes of other models assumed on each GPU (they take room from the key/value cache).
        """
        row = np.array(self._row(task, layout, 0), dtype=np.int64)
        return self.evaluator.price_alone(self._strategies, task, row, layout.array, held_bytes)

    def rank(self, task: RlTask, guesses: LayoutGuesses, held_bytes: float, *, deep: bool) -> tuple[RankedLayout, ...]:
        """Return good layouts of one task alone, priced as `task_s` prices them: the fastest, then leaner ones.

        Args:
            task: the task.
            guesses: the source of its layouts.
            held_bytes: bytes of other models assumed on each GPU.
            deep: try several times as many.
        """
        code, evaluator = self._ranking, self.evaluator
        row, micro_batch = evaluator.tasks.index(task), self._micro_batch[task]
        state, most = np.zeros(code.NUM_STATE, dtype=np.int64), code.most_recipes(guesses.choices)
        recipes, hashes = np.empty((most, self._num_recipe), dtype=np.int64), np.empty(most, dtype=np.int64)
        prices = np.empty((most, 2))
        while not code.rank_recipes(
            evaluator.words, self._strategies, row, micro_batch, held_bytes, guesses.words, deep, state, recipes,
            hashes, prices,
        ):  # fmt: skip
            evaluator.solve_rings()
        kept, replicas = np.empty(code.KEPT, dtype=np.int64), np.empty(code.KEPT, dtype=np.int64)
        gpus = np.empty((code.KEPT, guesses.choices.gpus.shape[1]), dtype=np.int64)
        count = code.keep_best(guesses.words, state, recipes, hashes, prices, kept, replicas, gpus)
        numbers, found = kept[:count], []
        rows = zip(prices[numbers].tolist(), recipes[numbers].tolist(), replicas.tolist(), gpus, strict=False)
        for (seconds, share), row, dp, placed in rows:
            recipe = _recipe(*row)
            found.append(RankedLayout(seconds, share, recipe, tuple(placed[: dp * recipe.pp * recipe.tp].tolist())))
        return tuple(found)

    def _packed(self, genome: Genome) -> tuple[IntArray, IntArray]:
        """Return shape and GPUs of a candidate."""
        group_of = {task: index for index, tasks in enumerate(genome.grouping) for task in tasks}
        layouts, order = genome.layouts, self.evaluator.tasks
        rows = [self._row(task, layouts[task], group_of[task]) for task in order]
        return np.array(rows, dtype=np.int64), np.concatenate([layouts[task].array for task in order])

    def _row(self, task: RlTask, layout: TaskLayout, group: int) -> tuple[int, ...]:
        """Return a task's row of a plan's shape."""
        split = SPLIT_NUMBERS[layout.split]
        return (layout.dp, layout.pp, layout.tp, self._micro_batch[task], split, group, 0, 0, 0, 0)

    def _is_allowed(self, genome: Genome) -> bool:
        """Tell whether the engines can run all layouts of a candidate."""
        return all(self._allows(task, layout) for task, layout in genome.layouts.items()) and self._limits.are_together(
            genome.layouts, self.evaluator.view
        )

    def _allows_uncached(self, task: RlTask, layout: TaskLayout) -> bool:
        return self._limits.allows(task, layout, self.evaluator.view)


def _recipe(subset: int, tp: int, pp: int, by_type: int, arrangement: int) -> Recipe:
    """Return a recipe of its row in machine code."""
    return Recipe(subset, tp, pp, bool(by_type), ARRANGEMENTS[arrangement])
