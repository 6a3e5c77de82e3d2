"""What people ask of the completions of one iteration: filtered pages, prompt groups, the rows behind a filter.

Used by the command line and by the pages. Everything runs over the views of ``storage.sql``; values of a filter are
bound, never pasted into the query.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from storage.layout import Split
from storage.rollout_schema import FinishReason, RewardStatus
from storage.sql import VIEWS, completions_of

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

Row = dict[str, Any]
"""A row with JSON values."""


class Order(StrEnum):
    """In which order rows are shown."""

    WORST = "worst"
    """Lowest reward first; rows without one before all."""
    BEST = "best"
    """Highest reward first."""
    LONGEST = "longest"
    """Most completion tokens first."""
    SHORTEST = "shortest"
    """Fewest completion tokens first."""
    ADVANTAGE = "advantage"
    """Lowest advantage first; rows without one last."""
    PROMPT = "prompt"
    """As they were sampled: by prompt and sample."""


_ORDERS: Final[Mapping[Order, str]] = {
    Order.WORST: "reward ASC NULLS FIRST",
    Order.BEST: "reward DESC NULLS LAST",
    Order.LONGEST: "num_tokens DESC",
    Order.SHORTEST: "num_tokens ASC",
    Order.ADVANTAGE: "advantage ASC NULLS LAST",
    Order.PROMPT: "prompt_index",
}

UNSCORED: Final = "unscored"
"""Reward status in a filter: the row has no row of rewards yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFilter:
    """Which completions of an iteration are wanted; an absent field asks for nothing."""

    iteration: int
    """RL iteration (split eval: policy version evaluated)."""
    split: Split = Split.TRAIN
    """Trained on, or evaluation."""
    prompt: str | None = None
    """Text that the prompt's id or text contains, in whatever case."""
    reward_min: float | None = None
    """Least reward."""
    reward_max: float | None = None
    """Largest reward."""
    status: RewardStatus | str | None = None
    """Reward status, or `unscored`."""
    finish: FinishReason | None = None
    """Why sampling ended."""
    version: int | None = None
    """Policy version that sampled at least a part of the completion."""
    region: str | None = None
    """Region of the machine that sampled."""
    is_text_hidden: bool = False
    """Whether `prompt` is looked for in ids only: a search in texts that are redacted would give them away."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the values to bind in :attr:`where`."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "is_text_hidden"}
        if self.status == UNSCORED:
            values["status"] = None
        if self.prompt is not None:
            values["prompt"] = self.prompt.lower()
        return {name: value for name, value in values.items() if value is not None}

    @property
    def where(self) -> str:
        """Return the condition over the columns of ``listed``."""
        terms = ["split = $split", "iteration = $iteration"]
        if self.status == UNSCORED:
            terms.append("reward_status IS NULL")
        known = _TERMS | {"prompt": "contains(lower(prompt_id), $prompt)"} if self.is_text_hidden else _TERMS
        terms += [known[name] for name in self.parameters if name in known]
        return " AND ".join(terms)


_TERMS: Final = {
    "prompt": """(contains(lower(prompt_id), $prompt)
        OR row_id IN (SELECT row_id FROM rollouts WHERE contains(lower(prompt_text), $prompt)))""",
    "reward_min": "reward >= $reward_min",
    "reward_max": "reward <= $reward_max",
    "status": "reward_status = $status",
    "finish": "finish_reason = $finish",
    "version": "$version BETWEEN policy_version_first AND policy_version_last",
    "region": "region = $region",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a filter finds in an iteration."""

    total: int
    """Rows of the iteration."""
    matching: int
    """Rows that the filter asks for."""
    prompts: int
    """Prompts among the matching rows."""
    reward_mean: float | None
    """Mean reward of the matching rows that have one."""
    tokens_mean: float | None
    """Mean completion length of the matching rows."""


def summary(connection: duckdb.DuckDBPyConnection, wanted: RolloutFilter) -> Summary:
    """Return counts and means of the rows that a filter asks for."""
    query = f"""
        SELECT count(*) FILTER (is_wanted) AS matching, count(DISTINCT prompt_id) FILTER (is_wanted) AS prompts,
               avg(reward) FILTER (is_wanted) AS reward_mean, avg(num_tokens) FILTER (is_wanted) AS tokens_mean,
               count(*) AS total
        FROM (SELECT prompt_id, reward, num_tokens, {wanted.where} AS is_wanted
              FROM listed WHERE split = $split AND iteration = $iteration)"""
    return Summary(**rows_of(connection, query, wanted.parameters)[0])


def page_of_rows(
    connection: duckdb.DuckDBPyConnection,
    wanted: RolloutFilter,
    order: Order,
    *,
    offset: int,
    limit: int,
    chars: int = 240,
) -> list[Row]:
    """Return one page of the rows that a filter asks for: what is listed of them, and texts cut short.

    Texts are read for the page's rows alone: with a million rows they are most of the data.

    Args:
        connection: From :func:`storage.sql.connect`.
        wanted: Which rows.
        order: In which order; ties by prompt and sample.
        offset: Rows before the page.
        limit: Rows of the page.
        chars: Length to which prompts and completions are cut.
    """
    found = rows_of(
        connection,
        f"""SELECT * FROM listed WHERE {wanted.where}
            ORDER BY {_ORDERS[order]}, prompt_index, sample_index LIMIT {int(limit)} OFFSET {int(offset)}""",
        wanted.parameters,
    )
    texts = _narrowed(
        connection, found, "SELECT row_id, left(prompt_text, $chars) AS prompt_text, "
        "left(completion_text, $chars) AS completion_text FROM rollouts", {"chars": chars},
    )  # fmt: skip
    by_id = {row["row_id"]: row for row in texts}
    return [{**row, **by_id[row["row_id"]]} for row in found]


def first_prompt(
    connection: duckdb.DuckDBPyConnection, iteration: int, split: Split, *, is_worst: bool = False
) -> str | None:
    """Return the id of an iteration's first prompt, or of the one with the lowest mean reward; None without rows."""
    order = "avg(reward) ASC NULLS FIRST, min(prompt_index)" if is_worst else "min(prompt_index)"
    query = f"""SELECT prompt_id FROM listed WHERE split = $split AND iteration = $iteration
                GROUP BY prompt_id ORDER BY {order} LIMIT 1"""
    rows = rows_of(connection, query, {"split": split.value, "iteration": iteration})
    return None if not rows else str(rows[0]["prompt_id"])


def group_rows(connection: duckdb.DuckDBPyConnection, iteration: int, split: Split, prompt: str) -> list[Row]:
    """Return all completions of one prompt with every column, in sample order; empty if there are none."""
    query = """SELECT row_id, prompt_index FROM rollouts
               WHERE split = $split AND iteration = $iteration AND prompt_id = $prompt"""
    found = rows_of(connection, query, {"split": split.value, "iteration": iteration, "prompt": prompt})
    return _narrowed(connection, found, f"{completions_of(tuple(VIEWS))} ORDER BY sample_index")


def _narrowed(
    connection: duckdb.DuckDBPyConnection, found: Sequence[Row], query: str, values: Mapping[str, Any] | None = None
) -> list[Row]:
    """Return what a query over the families says of a few rows, of which row id and prompt index are known.

    Each table is narrowed before it is joined. Values in a list, as against a subquery, reach the readers of the files,
    which leave out row groups without any of them; rollouts are sorted by prompt, families by row id.
    """
    if not found:
        return []
    ids = {f"id_{number}": row["row_id"] for number, row in enumerate(found)}
    named = ", ".join(f"${name}" for name in ids)
    among = f" AND prompt_index IN ({', '.join({str(int(row['prompt_index'])) for row in found})})"
    tables = [
        f"{view} AS (SELECT * FROM main.{view} WHERE row_id IN ({named}){among if view == 'rollouts' else ''})"
        for view in VIEWS.values()
    ]
    return rows_of(connection, f"WITH {', '.join(tables)} {query}", {**ids, **(values or {})})


def matching_batches(
    connection: duckdb.DuckDBPyConnection, wanted: RolloutFilter, order: Order, *, rows_per_batch: int = 4096
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the rows that a filter asks for with every column, batch by batch, for a file."""
    query = f"""SELECT completions.* FROM completions JOIN (
                    SELECT row_id, row_number() OVER (ORDER BY {_ORDERS[order]}, prompt_index, sample_index) AS place
                    FROM listed WHERE {wanted.where}
                ) AS wanted ON wanted.row_id = completions.row_id ORDER BY place"""
    reader = connection.sql(query, params=wanted.parameters).to_arrow_reader(rows_per_batch)
    return reader.schema, iter(reader)


def rows_of(
    connection: duckdb.DuckDBPyConnection, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None
) -> list[Row]:
    """Run a query and return JSON-able rows."""
    answer = connection.execute(query, parameters) if parameters else connection.execute(query)
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, map(json_value, row), strict=True)) for row in answer.fetchall()]


def json_value(value: Any) -> Any:  # noqa: ANN401 - whatever DuckDB returns
    """Return a value of an answer as JSON has it: a number that is none is null, times are ISO texts."""
    if isinstance(value, str | int | float | bool | None):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [json_value(item) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
