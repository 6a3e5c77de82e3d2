"""How often a small model samples exactly the right answer at temperature 1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Problem(Protocol):
    """A prompt with its answer, as token ids."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Prompt."""
        ...

    @property
    def answer_token_ids(self) -> Sequence[int]:
        """Answer, the end token included."""
        ...


def sampled_accuracy(model: Any, problems: Sequence[Problem], *, seed: int) -> float:  # noqa: ANN401 - untyped
    """Share of problems whose sampled completion is the answer, token by token, in [0, 1].

    Args:
        model: Causal language model.
        problems: At least one.
        seed: Seed of the samples; equal arguments give an equal result.
    """
    generator = torch.Generator().manual_seed(seed)
    by_length: dict[tuple[int, int], list[Problem]] = defaultdict(list)
    for problem in problems:
        by_length[len(problem.prompt_token_ids), len(problem.answer_token_ids)].append(problem)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = sum(_num_right(model, group, generator) for _, group in sorted(by_length.items(), key=lambda kv: kv[0]))
    model.train(was_training)
    return right / len(problems)


def _num_right(model: Any, problems: Sequence[Problem], generator: torch.Generator) -> int:  # noqa: ANN401 - untyped
    answers = torch.tensor([list(problem.answer_token_ids) for problem in problems])
    ids = torch.tensor([list(problem.prompt_token_ids) for problem in problems])
    is_right = torch.ones(len(problems), dtype=torch.bool)
    cache = None
    for place in range(answers.shape[1]):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        ids = _sample(output.logits[:, -1], generator)
        # What follows a wrong token doesn't matter, so all rows go on in step.
        is_right &= ids[:, 0] == answers[:, place]
    return int(is_right.sum())


def _sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
