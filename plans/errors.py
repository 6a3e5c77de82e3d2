"""The planner's error tree: what a caller can catch, and the data each error carries.

The branch says who can act: the author of a file (`SpecError`), nobody with this cluster (`InfeasibleError`),
the owner of the search budget (`SearchError`), or whoever combined the wrong files (`PlanMismatchError`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What is wrong with one place of a document."""

    SYNTAX = "syntax"
    MISSING = "missing"
    UNKNOWN_FIELD = "unknown_field"
    WRONG_TYPE = "wrong_type"
    OUT_OF_RANGE = "out_of_range"
    UNKNOWN_NAME = "unknown_name"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one document."""

    field: str
    """Path of the field, such as `machines[2].gpu`; empty for the whole document."""
    found: str
    """The value found, in text (shortened)."""
    rule: str
    """What is allowed there."""
    remedy: str
    """What the author can do about it."""
    kind: FaultKind
    """Class of the fault, for programs."""
    reads: tuple[str, ...] = ()
    """Other fields that the rule reads: while one of them is at fault itself, nothing can be said of this one."""

    def sentence(self) -> str:
        """Return the fault as one sentence without the document's name."""
        place = self.field or "the document"
        return f"{place} is {self.found}, but {self.rule}; {self.remedy}."


class PlanningError(Exception):
    """Root of every error of the planner."""


class SpecError(PlanningError, ValueError):
    """A document that its author must edit; carries all of its faults.

    Attributes:
        source_name: name of the document, normally its path.
        faults: every fault that was found, in document order.
    """

    def __init__(self, source_name: str, faults: Sequence[Fault]) -> None:
        """Build the message: one complete sentence for the first fault, then the others, one per line."""
        self.source_name = source_name
        self.faults = tuple(faults)
        first = f"{source_name}: {self.faults[0].sentence()}" if self.faults else f"{source_name}: invalid document."
        more = "".join(f"\n{source_name}: {fault.sentence()}" for fault in self.faults[1:])
        super().__init__(first + more)


class PlanMismatchError(PlanningError):
    """A plan that was made for another cluster or job.

    Attributes:
        what: `cluster` or `job`.
        expected: fingerprint of the document in hand.
        found: fingerprint written in the plan.
    """

    def __init__(self, source_name: str, what: str, *, expected: str, found: str) -> None:
        """Build the message from the two fingerprints."""
        self.source_name, self.what, self.expected, self.found = source_name, what, expected, found
        super().__init__(
            f"{source_name}: the plan was made for another {what}: it carries fingerprint {found[:12]}..., "
            f"the {what} given has {expected[:12]}...; plan again for this {what}, or give the one it was made for."
        )


class InfeasibleError(PlanningError):
    """No placement can exist for a valid cluster and job."""


class MemoryInfeasibleError(InfeasibleError):
    """Some GPUs would hold more than their memory.

    Attributes:
        shortfalls: the overfull places, as `plans.feasibility.Shortfall` values (typed there).
    """

    def __init__(self, message: str, shortfalls: Sequence[object] = ()) -> None:
        """Keep the shortfalls beside the message."""
        self.shortfalls = tuple(shortfalls)
        super().__init__(message)


class TooFewGpusError(InfeasibleError):
    """The cluster has fewer GPUs than the workflow needs."""


class NoRouteError(InfeasibleError):
    """GPUs that must talk to each other have no permitted link."""


class SearchError(PlanningError):
    """A search that could not do its work with what it was given."""


class BudgetTooSmallError(SearchError):
    """The budget does not allow a single evaluation per arm that the method needs."""


class SolverUnavailableError(SearchError):
    """The solver that a method needs is not installed or does not run."""


class NoIncumbentError(SearchError):
    """The time or evaluation limit was reached before any feasible plan was found."""
