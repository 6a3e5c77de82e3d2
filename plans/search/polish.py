"""Final polish: simulated annealing from the best candidates over the whole space (extension of HetRL).

Every walk has its own random stream and its own share of the budget, so walks may run in any process. Steps are the
mutations of the evolutionary algorithm and the moves between arms.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from plans.search.evolution import Evolution, KeepGoing, OnImproved
from plans.search.genome import Genome
from plans.search.pricing import Price
from plans.search.regroup import REGROUP_MOVES
from plans.search.seeds import Draws, shares_below
from plans.search.tools import SearchTools

#: Relative worsening accepted with probability 1/e at the start of a walk; falls to zero along it.
START_TEMPERATURE = 0.03
#: Share of steps that are moves between arms.
REGROUP_SHARE = 0.25
#: Steps without improvement after which a walk returns to its best candidate.
PATIENCE = 150


@dataclass(slots=True)
class WalkState:
    """One walk."""

    rng: Draws
    """Its random stream."""
    current: tuple[Price, Genome]
    """Where it stands."""
    best: tuple[Price, Genome]
    """The best candidate that it has seen."""
    stale: int = 0
    """Steps since the last improvement."""


class Polish:
    """Advances walks."""

    def __init__(self, tools: SearchTools, evolution: Evolution) -> None:
        """Keep tools and the evolutionary algorithm's mutations."""
        self._tools = tools
        self._evolution = evolution
        self._edges = shares_below([weight for _, weight in REGROUP_MOVES])

    def walk(
        self,
        state: WalkState,
        evaluations: int,
        cooling: Callable[[int], float],
        keep_going: KeepGoing,
        on_improved: OnImproved,
    ) -> int:
        """Spend at most `evaluations` on a walk; return how many were used.

        Args:
            state: the walk; changed in place.
            evaluations: most candidates to price.
            cooling: temperature factor in [0, 1] after so many steps of this call.
            keep_going: asked before each step.
            on_improved: told of each candidate that beats the walk's best.
        """
        used = 0
        while used < evaluations and keep_going():
            used += 1
            candidate = self._neighbour(state)
            price = self._tools.pricer.price(candidate)
            if self._accepts(state, price, START_TEMPERATURE * cooling(used)):
                state.current = (price, candidate)
            state.stale += 1
            if price < state.best[0]:
                state.best, state.stale = (price, candidate), 0
                on_improved(price, candidate)
            elif state.stale >= PATIENCE:
                state.current, state.stale = state.best, 0
        return used

    def _neighbour(self, state: WalkState) -> Genome:
        genome, rng = state.current[1], state.rng
        if rng.random() < REGROUP_SHARE:
            move = REGROUP_MOVES[bisect_right(self._edges, rng.random())][0]
            moved = move(self._tools, genome, rng)
            if moved is not None:
                return moved
        return self._evolution.mutate(genome, rng)

    @staticmethod
    def _accepts(state: WalkState, price: Price, temperature: float) -> bool:
        now = state.current[0]
        if not now < price:
            return True
        if not price.is_feasible or temperature <= 0.0:
            return False
        worse = price.score_s / now.score_s - 1.0
        return state.rng.random() < math.exp(-worse / temperature)
