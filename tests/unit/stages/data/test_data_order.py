"""Sampling order: a pure function of (seed, iteration)."""

from __future__ import annotations

import pytest

from stages.data.dataset import Dataset, load_dataset
from stages.data.order import epoch_of_iteration, prompts_for_iteration
from stages.data.spec import DataSpec
from stages.errors import DataError


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset(DataSpec(source="arithmetic:addition", size=23, held_out_fraction=0.0)).train


def ids(dataset: Dataset, iteration: int, seed: int = 5, num_prompts: int = 5) -> list[str]:
    return [row.prompt_id for row in prompts_for_iteration(dataset, seed, iteration, num_prompts)]


def test_no_prompt_repeats_inside_an_epoch(dataset: Dataset) -> None:
    for epoch in range(3):
        seen = [prompt for place in range(4) for prompt in ids(dataset, 4 * epoch + place)]
        assert len(seen) == len(set(seen)) == 20
        assert {epoch_of_iteration(dataset, 4 * epoch + place, 5) for place in range(4)} == {epoch}


def test_epochs_and_seeds_have_orders_of_their_own(dataset: Dataset) -> None:
    assert ids(dataset, 0) != ids(dataset, 4)
    assert ids(dataset, 0) != ids(dataset, 0, seed=6)


@pytest.mark.parametrize("crashes", [(3,), (5,), (5, 6), (9, 9, 10)])
def test_c7_c8_c10_c11_interrupted_order_equals_the_uninterrupted_one(
    dataset: Dataset, crashes: tuple[int, ...]
) -> None:
    # A resumed process knows the iteration that it starts with, nothing else; crashes fall in epochs 1, 2 and 3.
    uninterrupted = [ids(dataset, iteration) for iteration in range(12)]
    done: list[list[str]] = []
    for crash in (*crashes, 12):
        fresh = Dataset(dataset.rows)
        done.extend(ids(fresh, iteration) for iteration in range(len(done), crash))
    assert done == uninterrupted


def test_order_does_not_depend_on_the_order_of_the_rows(dataset: Dataset) -> None:
    assert ids(Dataset(dataset.rows[::-1]), 3) == ids(dataset, 3)


def test_dataset_smaller_than_an_iteration_is_refused(dataset: Dataset) -> None:
    with pytest.raises(DataError, match=r"batch\.prompts is 24, but the training part of the dataset has 23 rows"):
        ids(dataset, 0, num_prompts=24)
    assert sorted(ids(dataset, 7, num_prompts=23)) == sorted(row.prompt_id for row in dataset.rows)
