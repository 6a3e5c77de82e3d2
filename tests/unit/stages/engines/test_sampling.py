"""Temperature, truncation and draws: hand-derived values and independence of rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

import torch

from stages.engines.sampling import SamplingRows, processed_logprobs, sample_tokens, uniforms
from stages.errors import NumericsError

pytestmark = pytest.mark.engines

PROBS = [0.5, 0.25, 0.15, 0.1]


def settings(num: int = 1, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((num,), temperature, dtype=torch.float64),
        top_k=torch.full((num,), top_k),
        top_p=torch.full((num,), top_p, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, 0, 1.0, PROBS),
        # p^2 / sum(p^2), sum = 0.25 + 0.0625 + 0.0225 + 0.01 = 0.345
        (0.5, 0, 1.0, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        (1.0, 2, 1.0, [2 / 3, 1 / 3, 0, 0]),
        (1.0, 0, 0.75, [2 / 3, 1 / 3, 0, 0]),
        (1.0, 0, 0.76, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        (1.0, 0, 1e-9, [1, 0, 0, 0]),
        # top-k first: 5/9, 2.5/9, 1.5/9; of those the first two hold 0.83
        (1.0, 3, 0.8, [2 / 3, 1 / 3, 0, 0]),
        (1.0, 9, 1.0, PROBS),
        (0.0, 0, 1.0, PROBS),
    ],
)
def test_processed_logprobs_equal_hand_derived_values(
    temperature: float, top_k: int, top_p: float, expected: list[float]
) -> None:
    logits = torch.tensor([PROBS], dtype=torch.float64).log() + 3
    logprobs = processed_logprobs(logits, settings(1, temperature, top_k, top_p))
    np.testing.assert_allclose(logprobs.exp()[0].numpy(), expected, atol=1e-12)


def test_temperature_divides_logits_not_logprobs() -> None:
    """[L2] Scaled log-probs of a token are not the log-probs of the tempered distribution."""
    logits = torch.tensor([PROBS], dtype=torch.float64).log()
    tempered = processed_logprobs(logits, settings(1, 0.5))[0, 0].item()
    assert tempered == pytest.approx(math.log(0.25 / 0.345))
    assert tempered != pytest.approx(math.log(0.5) / 0.5, abs=0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_raise(bad: float) -> None:
    with pytest.raises(NumericsError, match="not finite at 1 of 2"):
        processed_logprobs(torch.tensor([[0.0, 1.0], [bad, 0.0]]), settings(2))


def test_minus_infinity_is_a_token_that_is_never_sampled() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]]).repeat(1000, 1)
    drawn = sample_tokens(processed_logprobs(logits, settings(1000)), settings(1000), torch.rand(1000).double())
    assert set(drawn.tolist()) == {0, 2}


def test_draws_invert_the_cumulative_distribution() -> None:
    logprobs = torch.tensor([PROBS], dtype=torch.float64).log().repeat(8, 1)
    draws = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 0.89, 0.91, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(logprobs, settings(8), draws).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logprobs = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.float64).log()
    assert sample_tokens(logprobs, settings(1, 0.0), torch.tensor([0.99], dtype=torch.float64)).tolist() == [1]


def test_frequencies_follow_the_distribution() -> None:
    num = 20_000
    logprobs = torch.tensor([PROBS], dtype=torch.float64).log().repeat(num, 1)
    drawn = sample_tokens(logprobs, settings(num), torch.from_numpy(uniforms(range(num), 1)[:, 0]))
    frequencies = np.bincount(drawn.numpy(), minlength=4) / num
    # 5 standard deviations of a share at most
    np.testing.assert_allclose(frequencies, PROBS, atol=5 * math.sqrt(0.25 / num))


def test_uniforms_depend_on_the_seed_alone() -> None:
    """[S1, S3] Not on neighbours, order or length of the series."""
    alone = uniforms([7], 5)
    together = uniforms([2**64 - 1, 7, 0], 9)
    assert together[1, :5].tolist() == alone[0].tolist()
    assert len({tuple(row) for row in together.tolist()}) == 3
