"""From the query of an address to a filter of rollouts: blanks ask for nothing, all faults are said together."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plugins.pages.faults import PageError
from plugins.pages.run_source import PageRun
from storage.layout import Split
from storage.rollout_queries import UNSCORED, Order, RolloutFilter
from storage.rollout_schema import FinishReason, RewardStatus

PAGE_ROWS: Final = 50
"""Rows of one page."""

STATUSES: Final = (*(status.value for status in RewardStatus), UNSCORED)
"""Values of the filter by reward status."""

_MOST: Final = 10**9


class RolloutQuery(BaseModel):
    """The query of an address about rollouts."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    iteration: int | None = Field(default=None, ge=0, le=_MOST)
    """RL iteration; absent is the newest one that is committed."""
    split: Split = Split.TRAIN
    """Train or eval."""
    prompt: str | None = Field(default=None, max_length=1000)
    """Text in the prompt's id or text."""
    reward_min: float | None = None
    """Least reward."""
    reward_max: float | None = None
    """Largest reward."""
    status: str | None = Field(default=None, pattern=f"^({'|'.join(STATUSES)})$")
    """Reward status or `unscored`."""
    finish: FinishReason | None = None
    """Why sampling ended."""
    version: int | None = Field(default=None, ge=0, le=_MOST)
    """Policy version."""
    region: str | None = Field(default=None, max_length=200)
    """Region."""
    order: Order = Order.WORST
    """In which order."""
    page: int = Field(default=1, ge=1, le=_MOST // PAGE_ROWS)
    """Page, from 1."""

    def filter(self, iteration: int, *, is_text_hidden: bool) -> RolloutFilter:
        """Return the filter for an iteration, over redacted texts or not."""
        asked = self.model_dump(exclude={"iteration", "order", "page"})
        return RolloutFilter(iteration=iteration, is_text_hidden=is_text_hidden, **asked)

    def address(self, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - values of a query
        """Return the query that asks for the same with some changes; what is as by default is left out."""
        plain = self.model_dump(mode="json", exclude_defaults=True)
        return {**plain, **changes}


def read_query(given: Mapping[str, str]) -> RolloutQuery:
    """Return what a query asks for.

    Raises:
        PageError: with a sentence for every value that can't be used.
    """
    try:
        return RolloutQuery.model_validate({name: value for name, value in given.items() if value != ""})
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))} is {str(fault['input'])[:60]!r}: {fault['msg']}"
            for fault in error.errors()
        ]
        raise PageError(f"The filter can't be used: {'; '.join(faults)}.", HTTPStatus.BAD_REQUEST) from error


def iteration_of(query_iteration: int | None, run: PageRun, split: Split) -> int:
    """Return the iteration that is asked for; by default the newest committed one (split eval: version)."""
    if query_iteration is not None:
        return query_iteration
    newest = run.done if split is Split.EVAL else run.done - 1
    return max(run.entry.first_iteration, newest)
