"""Supervised warm-up of a random model, until it samples the right answer often enough for RL to have a signal.

The stop is on sampled accuracy (temperature 1) on held-out prompts: over seeds, the same number of steps gave anything
from 0.06 to 0.34, and RL from too low a start learns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stages.errors import SpecFaultsError
from stages.models.answer_sampler import sampled_accuracy
from stages.spec.source import WarmUp

_GRAD_NORM = 1.0
_RISE_STEPS = 20
"""Optimizer steps over which the learning rate rises."""
_IGNORED = -100
"""Target id that cross entropy leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpRow:
    """A problem with its solution, as token ids."""

    prompt_token_ids: Sequence[int]
    answer_token_ids: Sequence[int]
    """Answer, the end token included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpProgress:
    """Where the warm-up stands."""

    step: int
    """Optimizer steps made."""
    max_steps: int
    loss: float
    """Mean cross entropy of the last batch, nats per answer token."""
    score: float
    """Share of right sampled answers at the last measurement, in [0, 1]."""


def warm_up(
    model: Any,  # noqa: ANN401 - transformers has no useful type
    spec: WarmUp,
    train: Sequence[WarmUpRow],
    held_out: Sequence[WarmUpRow],
    *,
    seed: int,
    report: Callable[[WarmUpProgress], None],
) -> WarmUpProgress:
    """Train in place until the target score is reached.

    Args:
        model: Causal language model in fp32.
        spec: Target, limits, batch size, learning rate.
        train: Rows to train on.
        held_out: Rows to measure on; empty = measure on training rows.
        seed: Seed of batches and of sampling; equal arguments give equal weights.
        report: Called after each measurement.

    Returns:
        The last measurement.

    Raises:
        SpecFaultsError: The score was not reached in `max_steps`.
    """
    generator = np.random.default_rng([seed, 1])
    measured = _measured_rows(held_out or train, spec.check_prompts, seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    batches = _batches(len(train), min(spec.batch_size, len(train)), generator)
    model.train()
    progress = WarmUpProgress(step=0, max_steps=spec.max_steps, loss=float("inf"), score=0.0)
    for step in range(1, spec.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * min(step / _RISE_STEPS, 1.0)
        loss = _train_step(model, optimizer, [train[index] for index in next(batches)])
        if step % spec.check_every and step != spec.max_steps:
            continue
        score = sampled_accuracy(model, measured, seed=seed * 1_000_003 + step)
        progress = WarmUpProgress(step=step, max_steps=spec.max_steps, loss=loss, score=score)
        report(progress)
        if score >= spec.target_score:
            return progress
    raise SpecFaultsError(
        "the job",
        [
            f"source.warm_up reached a score of {progress.score:.3f} in {spec.max_steps} optimizer steps, under "
            f"target_score {spec.target_score}; raise max_steps, lower target_score, or choose a larger shape or an "
            "easier dataset"
        ],
    )


def _measured_rows(rows: Sequence[WarmUpRow], count: int, seed: int) -> list[WarmUpRow]:
    order = np.random.default_rng([seed, 2]).permutation(len(rows))[:count]
    return [rows[index] for index in sorted(order.tolist())]


def _batches(num_rows: int, batch_size: int, generator: np.random.Generator) -> Iterator[list[int]]:
    """Batches without end, each row once per pass."""
    order: list[int] = []
    while True:
        while len(order) < batch_size:
            order += generator.permutation(num_rows).tolist()
        yield order[:batch_size]
        order = order[batch_size:]


def _train_step(model: Any, optimizer: torch.optim.Optimizer, rows: Sequence[WarmUpRow]) -> float:  # noqa: ANN401
    ids, targets = _padded(rows)
    logits = model(input_ids=ids, use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _padded(rows: Sequence[WarmUpRow]) -> tuple[Tensor, Tensor]:
    """Inputs and next-token targets (answer tokens only), padded on the right. Both [rows, longest - 1]."""
    width = max(len(row.prompt_token_ids) + len(row.answer_token_ids) for row in rows) - 1
    ids = np.zeros((len(rows), width), dtype=np.int64)
    targets = np.full((len(rows), width), _IGNORED, dtype=np.int64)
    for place, row in enumerate(rows):
        tokens = [*row.prompt_token_ids, *row.answer_token_ids]
        first = len(row.prompt_token_ids) - 1
        ids[place, : len(tokens) - 1] = tokens[:-1]
        targets[place, first : len(tokens) - 1] = row.answer_token_ids
    return torch.from_numpy(ids), torch.from_numpy(targets)
