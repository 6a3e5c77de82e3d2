"""The outer loop: bisection over training's share of compute, then a local swap search (AReaL-Hex, phase 2).

Independent of what a split costs: a callback answers that, so the loop can be tested on made-up costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plans.search.areal_hex.settings import ArealHexSettings
from plans.search.areal_hex.splits import Split, SplitTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCost:
    """What the best plan found on a split costs."""

    training_s: float
    """C_T; infinite where the training side cannot run."""
    rollout_s: float
    """C_I; infinite where the rollout side cannot run."""
    objective_s: float
    """What splits are compared by; infinite where either side cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of the bisection."""

    gamma: float
    """Share of compute asked for."""
    realised: float | None
    """Share that the split has; None where no split lies in the band."""
    cost: SplitCost | None
    """Its cost; None without a split."""


EMPTY = SplitCost(training_s=0.0, rollout_s=math.inf, objective_s=math.inf)
#: Steps of the grid that is scanned besides the bisection.
SCAN_STEPS = 12
#: Splits from which the swap search starts.
SWAP_STARTS = 3
#: Band widths, in steps, that are tried until a split lies inside.
BAND_WIDTHS = (0.5, 1.0, 2.0)


class Alternation:
    """Runs the outer loop over one table of splits."""

    def __init__(
        self,
        table: SplitTable,
        settings: ArealHexSettings,
        cost_of: Callable[[Split], SplitCost],
        is_spent: Callable[[], bool],
    ) -> None:
        """Keep the table, the settings, the costs and the question whether to end."""
        self._table, self._settings = table, settings
        self._cost_of, self._is_spent = cost_of, is_spent
        self._known: dict[Split, SplitCost] = {}
        self._best: tuple[float, Split] | None = None
        self._last: Split | None = None
        self._stale = 0
        self.rounds: list[Round] = []
        """What the bisection did."""

    def run(self) -> Split | None:
        """Return the split to use; None where none was found that runs."""
        if not self._bisect():
            return None
        if not self._settings.keep_best:
            is_good = self._last is not None and math.isfinite(self._cost(self._last).objective_s)
            return self._last if is_good else None
        if self._best is None or self._settings.swap_search:
            self._scan()
        if self._settings.swap_search:
            self._swap()
        return None if self._best is None else self._best[1]

    def _bisect(self) -> bool:
        """Bisect; tell whether it ran to its end."""
        # The printed start: all compute trains, so nothing generates.
        self.rounds.append(Round(gamma=1.0, realised=1.0, cost=EMPTY))
        if not self._settings.infinite_empty_side:
            return False
        bottom, top = 0.0, 1.0
        resolution = self._table.least_step_share / 2.0
        while top - bottom > resolution and self._stale < self._settings.patience and not self._is_spent():
            gamma = (bottom + top) / 2.0
            cost = self._round(gamma)
            if cost is None:
                return False
            if cost.training_s < cost.rollout_s:
                top = gamma
            else:
                bottom = gamma
        return True

    def _round(self, gamma: float) -> SplitCost | None:
        splits = self._in_band(gamma)
        if not splits:
            self.rounds.append(Round(gamma=gamma, realised=None, cost=None))
            return None
        split = min(splits, key=lambda s: self._cost(s).objective_s)
        cost = self._cost(split)
        self._last = split
        self.rounds.append(Round(gamma=gamma, realised=self._table.share_of(split), cost=cost))
        return cost

    def _in_band(self, gamma: float) -> list[Split]:
        most = self._settings.splits_per_round
        if not self._settings.share_band:
            return self._table.in_band(gamma, gamma, most)
        for width in BAND_WIDTHS:
            half = width * self._table.step_share
            found = self._table.in_band(gamma - half, gamma + half, most)
            if found:
                return found
        return self._table.in_band(0.0, 1.0, most)

    def _scan(self) -> None:
        """Price splits over the whole range: with discrete plans the costs need not be monotone in the share."""
        for step in range(1, SCAN_STEPS):
            for split in self._in_band(step / SCAN_STEPS):
                if not self._is_spent():
                    self._cost(split)

    def _swap(self) -> None:
        """Climb from the best few splits: a single start ends in the nearest local optimum."""
        priced = [(cost.objective_s, index, split) for index, (split, cost) in enumerate(self._known.items())]
        starts = sorted(entry for entry in priced if math.isfinite(entry[0]))[:SWAP_STARTS]
        for start_s, _, start in starts:
            here, split = start_s, start
            for steps in self._table.step_sizes:
                found = self._step(here, split, steps)
                while found is not None:
                    here, split = found
                    found = self._step(here, split, steps)

    def _step(self, here_s: float, split: Split, steps: Sequence[int]) -> tuple[float, Split] | None:
        """Return the first neighbour that gains, with its cost; None where none does."""
        for neighbour in self._table.neighbours(split, steps):
            if self._is_spent():
                return None
            cost_s = self._cost(neighbour).objective_s
            if cost_s < here_s * (1.0 - 1e-9):
                return cost_s, neighbour
        return None

    def _cost(self, split: Split) -> SplitCost:
        cost = self._known.get(split)
        if cost is not None:
            return cost
        cost = self._known[split] = self._cost_of(split)
        self._stale += 1
        if math.isfinite(cost.objective_s) and (self._best is None or cost.objective_s < self._best[0]):
            self._best, self._stale = (cost.objective_s, split), 0
        return cost
