"""The evolutionary algorithm of one arm (levels 3 to 5), which can be paused and continued (HetRL section 4.3).

One step: pick a parent, mutate, search locally for better locality, price; the offspring replaces the worst member
when it is better. Baldwinian: the locally improved candidate gives the fitness and may become the incumbent, the
population keeps the unimproved one; `lamarckian` keeps the improved one. Unpublished parameters are ours (hetrl.md 8).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from plans.search.arms import Arm
from plans.search.genome import Genome
from plans.search.mutations.registry import MUTATIONS
from plans.search.pricing import UNPLACEABLE, Price
from plans.search.seeds import Draws, draws, shares_below
from plans.search.tools import SearchTools

KeepGoing = Callable[[], bool]
OnImproved = Callable[[Price, Genome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolutionSettings:
    """Parameters of the algorithm."""

    population: int = 20
    """Most members."""
    seeds: int = 8
    """Seeded candidates before mutation starts."""
    local_search_share: float = 0.3
    """Share of offspring whose locality is improved; 1 as in the paper."""
    second_mutation_share: float = 0.3
    """Share of offspring that are mutated twice."""
    lamarckian: bool = False
    """Keep the locally improved candidate in the population."""


@dataclass(slots=True)
class ArmState:
    """A population that lives on between rounds."""

    arm: Arm
    """The arm."""
    rng: Draws
    """Its random stream."""
    members: list[tuple[Price, Genome]] = field(default_factory=list)
    """Population with fitness, best first."""
    seeds_done: int = 0
    """Seeds priced so far."""
    best: tuple[Price, Genome] | None = None
    """Cheapest candidate ever priced in this arm."""

    @classmethod
    def start(cls, arm: Arm, seed: int) -> ArmState:
        """Return an arm that nothing was spent on."""
        return cls(arm=arm, rng=draws(seed, "arm", arm.identity))

    @property
    def score(self) -> Price:
        """Rank of the arm: its cheapest candidate."""
        return UNPLACEABLE if self.best is None else self.best[0]


class Evolution:
    """Grows arms."""

    def __init__(self, tools: SearchTools, settings: EvolutionSettings) -> None:
        """Keep tools and parameters."""
        self._tools = tools
        self._settings = settings
        self._edges = shares_below([weight for _, weight in MUTATIONS])

    def grow(self, state: ArmState, evaluations: int, keep_going: KeepGoing, on_improved: OnImproved) -> int:
        """Spend at most `evaluations` on an arm; return how many were used.

        Args:
            state: the arm; changed in place.
            evaluations: most candidates to price.
            keep_going: asked before each step.
            on_improved: told of each candidate that beats the arm's best.
        """
        used = 0
        while used < evaluations and keep_going():
            if state.seeds_done < self._settings.seeds:
                used += self._plant(state, on_improved)
            else:
                used += self._step(state, evaluations - used, on_improved)
        return used

    def _plant(self, state: ArmState, on_improved: OnImproved) -> int:
        genome = self._tools.seeder.seed(state.arm.grouping, state.arm.sizes, state.seeds_done, state.rng)
        state.seeds_done += 1
        price = self._price(state, genome, on_improved)
        self._admit(state, price, genome)
        return 1

    def _step(self, state: ArmState, evaluations: int, on_improved: OnImproved) -> int:
        offspring = self._mutated(state)
        price = self._price(state, offspring, on_improved)
        used, settings = 1, self._settings
        if used < evaluations and state.rng.random() < settings.local_search_share:
            improved = self._tools.swaps.improve(offspring)
            if improved is not offspring:
                improved_price = self._price(state, improved, on_improved)
                used += 1
                if improved_price < price:
                    price = improved_price
                    offspring = improved if settings.lamarckian else offspring
        self._admit(state, price, offspring)
        return used

    def _mutated(self, state: ArmState) -> Genome:
        genome = self._parent(state)
        twice = state.rng.random() < self._settings.second_mutation_share
        for _ in range(2 if twice else 1):
            genome = self.mutate(genome, state.rng)
        return genome

    def mutate(self, genome: Genome, rng: Draws) -> Genome:
        """Return the candidate after one mutation that applies; unchanged when several draws found none."""
        for _ in range(8):
            operator = MUTATIONS[bisect_right(self._edges, rng.random())][0]
            changed = operator(self._tools, genome, rng)
            if changed is not None:
                return changed
        return genome

    @staticmethod
    def _parent(state: ArmState) -> Genome:
        """Return the better of two members drawn at random (members are sorted)."""
        count = len(state.members)
        return state.members[min(state.rng.below(count), state.rng.below(count))][1]

    def _price(self, state: ArmState, genome: Genome, on_improved: OnImproved) -> Price:
        price = self._tools.pricer.price(genome)
        if state.best is None or price < state.best[0]:
            state.best = (price, genome)
            on_improved(price, genome)
        return price

    def _admit(self, state: ArmState, price: Price, genome: Genome) -> None:
        """Insert a member in order; drop the worst when there are too many, and refuse equals (they add nothing)."""
        members = state.members
        if any(price == other and genome == member for other, member in members):
            return
        if len(members) >= self._settings.population:
            if not price < members[-1][0]:
                return
            members.pop()
        position = len(members)
        while position and price < members[position - 1][0]:
            position -= 1
        members.insert(position, (price, genome))
