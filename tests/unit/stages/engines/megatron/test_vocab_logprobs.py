"""Log-probs over a sharded vocabulary, with one shard; several are compared in the property test of layouts."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

import torch

from stages.engines.megatron.vocab_logprobs import VocabShard, sharded_logprobs

pytestmark = pytest.mark.engines


def by_autograd(hidden, weight, targets, temperatures):
    """The same numbers from whole logits and torch's own softmax."""
    log_softmax = torch.log_softmax(hidden @ weight.t() / temperatures[:, None], dim=-1)
    chosen = log_softmax.gather(-1, targets[:, None]).squeeze(-1)
    return chosen, -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_values_and_gradients_are_those_of_the_whole_softmax(chunk_tokens):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=generator).requires_grad_() for size in ((7, 5), (11, 5)))
    targets = torch.tensor([0, 10, 3, 3, 9, 1, 5])
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.0, 3.0])
    upstream = torch.randn((2, 7), generator=generator)

    shard = VocabShard(first=0, size=11)
    found = sharded_logprobs(hidden, weight, targets, temperatures, shard, chunk_tokens=chunk_tokens, with_entropy=True)
    gradients = torch.autograd.grad(
        [(part * up).sum() for part, up in zip(found, upstream, strict=True)], [hidden, weight]
    )

    expected = by_autograd(hidden, weight, targets, temperatures)
    wanted = torch.autograd.grad(
        [(part * up).sum() for part, up in zip(expected, upstream, strict=True)], [hidden, weight]
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, wanted)


def test_padding_rows_of_the_head_count_for_nothing():
    hidden, weight = torch.ones(2, 3), torch.full((4, 3), 9.0)
    weight[:2] = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])

    found, entropy = sharded_logprobs(
        hidden, weight, torch.tensor([0, 1]), torch.ones(2), VocabShard(first=0, size=2),
        chunk_tokens=8, with_entropy=False,
    )  # fmt: skip

    # Logits 0 and 1: log(1 / (1 + e)) and log(e / (1 + e)).
    assert found.tolist() == pytest.approx([-1.3132617, -0.3132617])
    assert entropy is None
