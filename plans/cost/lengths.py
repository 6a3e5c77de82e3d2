"""What the cost model needs to know of token lengths: maxima for the paper, moments and tails when calibrated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from plans.spec.job import Lengths


@dataclass(frozen=True, slots=True)
class LengthMoments:
    """Moments of prompt and response lengths."""

    prompt: float
    """Mean prompt length, tokens."""
    response: float
    """Mean response length, tokens."""
    response_std: float
    """Standard deviation of response lengths, tokens."""
    response_max: float
    """Longest response, tokens."""
    tail: float | None = None
    """Share of batches whose longest response is no longer than what is charged; None = the expected longest one."""

    @property
    def total(self) -> float:
        """Mean sequence length, tokens."""
        return self.prompt + self.response

    @property
    def total_square(self) -> float:
        """Mean squared sequence length (prompt lengths taken as constant)."""
        return self.total * self.total + self.response_std * self.response_std

    def longest_of(self, num_sequences: float) -> float:
        """Return the longest response among n sequences that is charged; log-normal, cut (reconstruction).

        Expected: the quantile n / (n + 1). With a `tail` of p: the p-th quantile of the maximum, p^(1/n).
        """
        if self.response_std == 0.0:
            return self.response
        variance = math.log1p((self.response_std / self.response) ** 2)
        centre = math.log(self.response) - variance / 2.0
        share = num_sequences / (num_sequences + 1.0) if self.tail is None else self.tail ** (1.0 / num_sequences)
        quantile = NormalDist().inv_cdf(share)
        return min(self.response_max, max(self.response, math.exp(centre + quantile * math.sqrt(variance))))


def moments_of(lengths: Lengths, tail: float | None = None) -> LengthMoments:
    """Return the moments that a job states; a mean that is absent is the maximum; `tail` as in `LengthMoments`."""
    response = lengths.response_mean if lengths.response_mean is not None else float(lengths.response)
    return LengthMoments(
        prompt=lengths.prompt_mean if lengths.prompt_mean is not None else float(lengths.prompt),
        response=response,
        response_std=lengths.response_std or 0.0,
        response_max=float(lengths.response),
        tail=tail,
    )
