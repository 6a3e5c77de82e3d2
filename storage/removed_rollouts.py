"""Which iterations' rollouts were removed on purpose: ``removed.json`` of a run, in the store of every region.

It is written before anything goes, so whoever misses rows finds the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from storage.documents import model_bytes, read_model
from storage.errors import ObjectMissingError
from storage.layout import removed_rollouts
from storage.store import Store

REMOVED_FORMAT: Final = "motley.removed/1"


class Removal(BaseModel):
    """What was removed of one iteration, and why."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    removed_at: AwareDatetime
    """When, UTC."""
    rule: str
    """Which rollouts are kept, in words."""
    rows: int = Field(ge=0)
    """Completions that it had."""
    size_bytes: int = Field(ge=0)
    """Bytes of all its families."""
    is_complete: bool = False
    """Whether everything is gone; otherwise the next pass goes on."""


class RemovedRollouts(BaseModel):
    """The document ``removed.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.removed/1"] = "motley.removed/1"
    """Kind and version of this document."""
    iterations: dict[int, Removal] = {}
    """By iteration."""


def read_removals(store: Store, run: str) -> dict[int, Removal]:
    """Return what was removed, by iteration; empty if nothing ever was.

    Raises:
        CorruptObjectError: The document cannot be read.
    """
    try:
        return dict(read_model(store, removed_rollouts(run), RemovedRollouts, REMOVED_FORMAT).iterations)
    except ObjectMissingError:
        return {}


def write_removals(store: Store, run: str, removals: Mapping[int, Removal]) -> None:
    """Replace the document."""
    document = RemovedRollouts(iterations=dict(sorted(removals.items())))
    store.publish(removed_rollouts(run), model_bytes(document, removed_rollouts(run)))


def forget_removals(store: Store, run: str, first: int) -> None:
    """Forget the iterations from ``first`` on: they are made anew."""
    removals = read_removals(store, run)
    if left := {iteration: removal for iteration, removal in removals.items() if iteration < first}:
        if left != removals:
            write_removals(store, run, left)
    elif removals:
        store.delete(removed_rollouts(run))


def removal_sentence(store: Store, run: str, iteration: int) -> str | None:
    """Return why an iteration has no rollouts any more, ``None`` if they were not removed on purpose."""
    removal = read_removals(store, run).get(iteration)
    if removal is None:
        return None
    return (
        f"the rollouts of iteration {iteration} of run {run} ({removal.rows} rows) were removed on "
        f"{removal.removed_at:%Y-%m-%d %H:%M} UTC, since {removal.rule}; its record, metrics and evaluation are kept"
    )
