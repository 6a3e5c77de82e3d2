"""Which prompts an iteration trains on: a pure function of (seed, iteration), so that no position has to be saved.

An interrupted and resumed run therefore sees the same prompts as an uninterrupted one, in every epoch and after any
number of interruptions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from stages.data.dataset import Dataset
from stages.data.rows import PromptRow
from stages.errors import DataError


def prompts_for_iteration(dataset: Dataset, seed: int, iteration: int, num_prompts: int) -> list[PromptRow]:
    """The prompts of one iteration, in order.

    Each epoch is a permutation of the dataset by hashes of (seed, epoch, prompt_id), cut into iterations of
    `num_prompts`; it depends neither on the order of the rows nor on the release of any library. The remainder of an
    epoch that doesn't fill an iteration is left out (another remainder in each epoch): an iteration across two epochs
    could hold a prompt twice, and two groups of one prompt would have the same row ids.

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
    order = epoch_order(dataset, seed, epoch)
    return order[place * num_prompts : (place + 1) * num_prompts]


def epoch_order(dataset: Dataset, seed: int, epoch: int) -> list[PromptRow]:
    """All rows in the order of one epoch: by their hash with (seed, epoch). O(n log n)."""
    return sorted(dataset.rows, key=lambda row: hashlib.sha256(f"{seed} {epoch} {row.prompt_id}".encode()).digest())


def epoch_of_iteration(dataset: Dataset, iteration: int, num_prompts: int) -> int:
    """Epoch, from 0, that an iteration belongs to.

    Raises:
        DataError: The dataset is smaller than one iteration.
    """
    return iteration // _iterations_per_epoch(dataset, num_prompts)


def further_order(prompt_ids: Sequence[str], used: Sequence[str], seed: int, iteration: int, count: int) -> list[int]:
    """Return the places of the rows that an iteration may sample beyond its batch, in order.

    Args:
        prompt_ids: Of the training part of the dataset.
        used: Of the iteration's batch; they are left out.
        seed: Data seed of the run.
        iteration: Iteration.
        count: Rows wanted; fewer come where the dataset has no more.
    """
    taken = set(used)
    free = [place for place, prompt in enumerate(prompt_ids) if prompt not in taken]

    def digest(place: int) -> bytes:
        return hashlib.sha256(f"further {seed} {iteration} {prompt_ids[place]}".encode()).digest()

    return sorted(free, key=digest)[:count]


def _iterations_per_epoch(dataset: Dataset, num_prompts: int) -> int:
    if not 1 <= num_prompts <= len(dataset):
        raise DataError(
            f"batch.prompts is {num_prompts}, but the training part of the dataset has {len(dataset)} rows; an "
            "iteration needs 1 to that many prompts. Lower batch.prompts, give more rows or hold out fewer"
        )
    return len(dataset) // num_prompts
