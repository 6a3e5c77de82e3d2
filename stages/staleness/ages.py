"""How old the rows of an iteration were when they were trained on."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pydantic import JsonValue

if TYPE_CHECKING:
    from stages.training_rows import PreparedRows


def age_metrics(prepared: PreparedRows) -> dict[str, JsonValue]:
    """Return lags in policy versions and the share of rows that were too old.

    The mean is over the rows that were trained on; the limit is the job's and stands beside it in the report, since a
    full pipeline sits at its limit whatever the limit is. Rows that were withheld are counted apart.
    """
    trained = [prepared.staleness[place] for place in prepared.kept]
    withheld = [age for age, reason in zip(prepared.staleness, prepared.reasons, strict=True) if reason == "stale"]
    return {
        "histogram": _histogram(trained),
        "withheld_histogram": _histogram(withheld),
        "mean": sum(trained) / len(trained) if trained else None,
        "max": max(trained, default=None),
        "discard_fraction": len(withheld) / len(prepared.rows) if prepared.rows else 0.0,
    }


def _histogram(ages: list[int]) -> dict[str, JsonValue]:
    counts = Counter(ages)
    return {str(age): counts[age] for age in sorted(counts)}
