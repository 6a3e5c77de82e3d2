"""The objects that searches share inside one process."""

from __future__ import annotations

from functools import cached_property

from plans.search.balancing import Balancing
from plans.search.pricing import Pricer
from plans.search.problem import Problem
from plans.search.ranking import Ranker
from plans.search.seeding import Seeder
from plans.search.swap_search import SwapSearch


class SearchTools:
    """Pricer, ranker and seeder of one problem; what they keep changes no result."""

    def __init__(self, problem: Problem, balancing: Balancing | None = None) -> None:
        """Build the tools."""
        self.problem = problem
        self.pricer = Pricer(problem.evaluator, balancing if balancing is not None else Balancing(), problem.limits)
        self.ranker = Ranker(problem, self.pricer)
        self.seeder = Seeder(problem, self.pricer, self.ranker)

    @cached_property
    def swaps(self) -> SwapSearch:
        """The locality swap search."""
        return SwapSearch(self.problem.view)
