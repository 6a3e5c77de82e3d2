"""Questions about the completions of one iteration, on a small committed run."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from storage.errors import ObjectMissingError
from storage.layout import Split
from storage.prompt_search import iterations_with_prompt
from storage.rollout_queries import (
    Order,
    RolloutFilter,
    first_prompt,
    group_rows,
    json_value,
    matching_batches,
    page_of_rows,
    rows_of,
    summary,
)
from storage.rollouts import write_family, write_rollouts
from storage.sql import connect
from storage.store import Store, open_store
from tests.helpers.storage_builders import NOW, RUN, new_run, reward_row, rollout_row, write_iteration_data


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(str(tmp_path))
    new_run(made)
    for iteration in range(2):
        write_iteration_data(made, iteration)
    return made


def test_views_hold_only_the_iterations_that_were_named(store: Store) -> None:
    with connect(store, RUN, [1]) as connection:
        assert rows_of(connection, "SELECT DISTINCT iteration FROM completions") == [{"iteration": 1}]
    with connect(store, RUN) as connection:
        assert rows_of(connection, "SELECT count(DISTINCT iteration) AS n FROM completions") == [{"n": 2}]


def test_page_keeps_the_order_of_its_question_and_cuts_texts(store: Store) -> None:
    wanted = RolloutFilter(iteration=0)
    with connect(store, RUN, [0]) as connection:
        rows = page_of_rows(connection, wanted, Order.BEST, offset=1, limit=3, chars=2)
    assert [(row["prompt_index"], row["sample_index"], row["reward"]) for row in rows] == [
        (1, 1, 1.0), (2, 1, 1.0), (3, 1, 1.0),
    ]  # fmt: skip
    assert rows[0]["prompt_text"] == "1 "
    assert "completion_token_ids" not in rows[0]


def test_summary_counts_what_the_filter_asks_for_within_the_iteration(store: Store) -> None:
    with connect(store, RUN) as connection:
        found = summary(connection, RolloutFilter(iteration=1, reward_min=0.5))
    assert (found.total, found.matching, found.prompts, found.reward_mean, found.tokens_mean) == (8, 4, 4, 1.0, 2.0)


def test_values_of_a_filter_are_bound(store: Store) -> None:
    """Text that would end a literal asks for itself."""
    hostile = "' OR 1=1 --"
    with connect(store, RUN, [0]) as connection:
        for wanted in (RolloutFilter(iteration=0, prompt=hostile), RolloutFilter(iteration=0, region=hostile)):
            assert summary(connection, wanted).matching == 0
            assert page_of_rows(connection, wanted, Order.WORST, offset=0, limit=9) == []


def test_worst_prompt_is_the_one_with_the_lowest_mean_reward(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    new_run(store)
    rows = [rollout_row(prompt, sample) for prompt in range(3) for sample in range(2)]
    write_rollouts(store, RUN, 0, 0, 1, rows, input_fingerprint="f", created_by="test")
    values = {0: (1.0, 1.0), 1: (0.0, 0.5), 2: (0.5, 0.5)}
    rewards = [reward_row(p, s, reward=value) for p, pair in values.items() for s, value in enumerate(pair)]
    write_family(store, RUN, 0, "reward", 0, 1, rewards, input_fingerprint="f", created_by="test")
    with connect(store, RUN, [0]) as connection:
        assert first_prompt(connection, 0, Split.TRAIN, is_worst=True) == "arithmetic/1"
        assert first_prompt(connection, 0, Split.TRAIN) == "arithmetic/0"
        assert first_prompt(connection, 5, Split.TRAIN) is None
        assert [row["reward"] for row in group_rows(connection, 0, Split.TRAIN, "arithmetic/1")] == [0.0, 0.5]


def test_batches_hold_every_matching_row_once_with_every_column(store: Store) -> None:
    with connect(store, RUN, [0]) as connection:
        schema, batches = matching_batches(connection, RolloutFilter(iteration=0), Order.PROMPT, rows_per_batch=3)
        rows = [row for batch in batches for row in batch.to_pylist()]
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(p, s) for p in range(4) for s in range(2)]
    assert {"completion_token_ids", "reward", "reference_logprobs"} <= set(schema.names)


def test_prompt_is_found_in_its_iterations(store: Store) -> None:
    write_rollouts(store, RUN, 2, 0, 1, [rollout_row(9, 0, 2)], input_fingerprint="f", created_by="test", attempt="a")
    assert iterations_with_prompt(store, RUN, range(5), "train", "arithmetic/3") == [0, 1]
    assert iterations_with_prompt(store, RUN, range(5), "train", "arithmetic/9") == [2]
    assert iterations_with_prompt(store, RUN, range(5), "eval", "arithmetic/3") == []


def test_file_that_is_gone_is_named(store: Store) -> None:
    gone = next(info.key for info in store.list(f"{RUN}/iterations/0/reward") if info.key.endswith(".parquet"))
    store.delete(gone)
    with pytest.raises(ObjectMissingError, match="removed by retention or by hand") as caught:
        connect(store, RUN, [0])
    assert caught.value.key == gone
    with connect(store, RUN, [1]) as connection:
        assert summary(connection, RolloutFilter(iteration=1)).total == 8


def test_json_values_have_no_numbers_that_are_none() -> None:
    assert json_value({"a": [float("nan"), 1.5, None], "t": NOW}) == {"a": [None, 1.5, None], "t": NOW.isoformat()}
    assert rows_of(duckdb.connect(), "SELECT 'inf'::double AS x, [1, 2] AS y") == [{"x": None, "y": [1, 2]}]
