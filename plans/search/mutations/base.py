"""What a mutation is."""

from __future__ import annotations

from collections.abc import Callable

from plans.search.genome import Genome
from plans.search.seeds import Draws
from plans.search.tools import SearchTools

Mutation = Callable[[SearchTools, Genome, Draws], Genome | None]
"""A changed candidate, or None where the operator does not apply. Grouping and group sizes never change."""
