"""Which prompts an iteration trains on: a pure function of (seed, iteration), so that no position has to be saved.

An interrupted and resumed run therefore sees the same prompts as an uninterrupted one, in every epoch and after any
number of interruptions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stages.data.dataset import Dataset
from stages.data.rows import PromptRow
from stages.errors import DataError


def prompts_for_iteration(dataset: Dataset, seed: int, iteration: int, num_prompts: int) -> list[PromptRow]:
    """The prompts of one iteration, in order.

    Each epoch is a permutation of the dataset by (seed, epoch), cut into iterations of `num_prompts`. The remainder of
    an epoch that doesn't fill an iteration is left out (another remainder in each epoch): an iteration across two
    epochs could hold a prompt twice, and two groups of one prompt would have the same row ids.

    Args:
        dataset: Training rows.
        seed: Data seed of the run.
        iteration: >= 0.
        num_prompts: Prompts per iteration, in [1, len(dataset)].

    Raises:
        DataError: The dataset is smaller than one iteration.
    """
    per_epoch = _iterations_per_epoch(dataset, num_prompts)
    epoch, place = divmod(iteration, per_epoch)
    order = epoch_order(len(dataset), seed, epoch)
    return [dataset.rows[row] for row in order[place * num_prompts : (place + 1) * num_prompts]]


def epoch_order(num_rows: int, seed: int, epoch: int) -> Sequence[int]:
    """Permutation of row numbers in one epoch; depends on (num_rows, seed, epoch) only."""
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()
    return order


def epoch_of_iteration(dataset: Dataset, iteration: int, num_prompts: int) -> int:
    """Epoch, from 0, that an iteration belongs to.

    Raises:
        DataError: The dataset is smaller than one iteration.
    """
    return iteration // _iterations_per_epoch(dataset, num_prompts)


def _iterations_per_epoch(dataset: Dataset, num_prompts: int) -> int:
    if not 1 <= num_prompts <= len(dataset):
        raise DataError(
            f"batch.prompts is {num_prompts}, but the training part of the dataset has {len(dataset)} rows; an "
            "iteration needs 1 to that many prompts. Lower batch.prompts, give more rows or hold out fewer"
        )
    return len(dataset) // num_prompts
