"""The quality report of an iteration: what its rollouts look like, judged by rules that say what they found.

Made from committed rollouts and rewards only, so it comes out the same however often it is made. Its reader is a data
team; training decides nothing by it.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from storage.documents import model_bytes, read_model
from storage.errors import ObjectMissingError
from storage.layout import quality_report
from storage.rollout_queries import Row, rows_of
from storage.rollouts import has_rollouts
from storage.sql import connect
from storage.store import Store

QUALITY_FORMAT: Final = "motley.quality/1"

WORST_PROMPTS: Final = 10
"""Prompts that the report names."""

_TOTALS: Final = """
SELECT count(*) AS rows, count(DISTINCT prompt_id) AS prompts, count(reward) AS scored, avg(reward) AS reward_mean,
       quantile_cont(reward, 0.05) AS reward_p05, quantile_cont(reward, 0.5) AS reward_p50,
       quantile_cont(reward, 0.95) AS reward_p95, avg(len(completion_token_ids)) AS tokens_mean,
       quantile_cont(len(completion_token_ids), 0.95) AS tokens_p95, max(len(completion_token_ids)) AS tokens_max,
       avg((finish_reason = 'length')::int) AS truncated_fraction,
       avg((len(completion_token_ids) = 0 OR trim(coalesce(completion_text, 'x')) = '')::int) AS empty_fraction
FROM completions WHERE split = 'train'"""

_GROUPS: Final = """
SELECT avg((low IS NOT DISTINCT FROM high)::int) AS flat_fraction, avg(1 - different / rows) AS repeated_fraction
FROM (SELECT min(reward) AS low, max(reward) AS high, count(DISTINCT completion_token_ids) AS different,
             count(*) AS rows
      FROM completions WHERE split = 'train' GROUP BY group_id)"""

_COUNTS: Final = """
SELECT coalesce({column}::varchar, 'none') AS name, count(*) AS rows
FROM completions WHERE split = 'train' GROUP BY 1 ORDER BY 1"""

_WORST: Final = f"""
SELECT prompt_id, avg(reward) AS reward_mean, count(*) - count(reward) AS unscored
FROM completions WHERE split = 'train' GROUP BY prompt_id, prompt_index
ORDER BY reward_mean NULLS FIRST, prompt_index LIMIT {WORST_PROMPTS}"""


class QualityCheck(BaseModel):
    """One rule and how it came out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    """Number of the report that is judged."""
    found: float | None
    """Its value; null where it is not defined."""
    limit: float
    """Largest value that is good."""
    is_good: bool
    """Whether it is within the limit."""


class QualityReport(BaseModel):
    """The document ``quality.json`` of an iteration."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: Literal["motley.quality/1"] = QUALITY_FORMAT
    """Kind and version of this document."""
    run: str
    """Run name."""
    iteration: int = Field(ge=0)
    """RL iteration."""
    totals: dict[str, float | None]
    """Counts, means and quantiles over all rows, fractions in [0, 1]."""
    counts: dict[str, dict[str, int]]
    """Rows by value, for reward statuses, finish reasons, machines and policy versions."""
    worst_prompts: list[dict[str, Any]]
    """Prompts with the lowest mean reward, unscored ones first."""
    checks: list[QualityCheck]
    """Rules."""

    @property
    def faults(self) -> list[str]:
        """Names of the rules that were broken."""
        return [check.name for check in self.checks if not check.is_good]


#: Fractions and the largest value that is good: above it most of an iteration's sampling is wasted.
_LIMITS: Final = {
    "truncated_fraction": 0.5, "empty_fraction": 0.05, "unscored_fraction": 0.2, "flat_fraction": 0.9,
    "repeated_fraction": 0.5,
}  # fmt: skip

_COUNTED: Final = {
    "reward_status": "reward_status", "finish_reason": "finish_reason", "machine": "machine",
    "policy_version": "policy_version_first",
}  # fmt: skip


def build_quality_report(store: Store, run: str, iteration: int) -> QualityReport:
    """Return the report of an iteration, from its committed rollouts.

    Raises:
        ObjectMissingError: the iteration has no committed rollouts.
    """
    if not has_rollouts(store, run, iteration):
        message = f"run {run} has no committed rollouts of iteration {iteration} in {store.url} to report on"
        raise ObjectMissingError(message)
    with connect(store, run, [iteration]) as connection:
        totals: Row = {**rows_of(connection, _TOTALS)[0], **rows_of(connection, _GROUPS)[0]}
        counts = {
            name: {row["name"]: row["rows"] for row in rows_of(connection, _COUNTS.format(column=column))}
            for name, column in _COUNTED.items()
        }
        worst = rows_of(connection, _WORST)
    totals["unscored_fraction"] = 1.0 - totals["scored"] / totals["rows"]
    checks = [
        QualityCheck(name=name, found=totals[name], limit=limit, is_good=(totals[name] or 0.0) <= limit)
        for name, limit in _LIMITS.items()
    ]
    return QualityReport(run=run, iteration=iteration, totals=totals, counts=counts, worst_prompts=worst, checks=checks)


def write_quality_report(store: Store, report: QualityReport) -> str:
    """Write a report, over an earlier one of the iteration, and return its key."""
    key = quality_report(report.run, report.iteration)
    store.publish(key, model_bytes(report, key))
    return key


def read_quality_report(store: Store, run: str, iteration: int) -> QualityReport:
    """Return the report of an iteration. Raises ``ObjectMissingError`` or ``CorruptObjectError``."""
    return read_model(store, quality_report(run, iteration), QualityReport, QUALITY_FORMAT)
