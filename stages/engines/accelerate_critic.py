"""Critic engine on transformers and accelerate: values, and training of the value model."""

from __future__ import annotations

from collections.abc import Sequence

from stages.engines.protocol import CriticOutcome, CriticTrainingRequest, ScoredTokens
from stages.engines.training.ranked_engine import RankedEngine
from stages.engines.training.request_checks import check_critic_request, check_rows


class AccelerateCritic(RankedEngine):
    """Implements `CriticEngine`; its directories hold a token classifier with one label."""

    kind = "critic"

    def values(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Value before each completion token, [rows][completion tokens]."""
        self.weights.require_usable()
        check_rows(rows, vocab_size=self._trainer.vocab_size, max_sequence_tokens=self._max_sequence_tokens)
        values: list[list[float]] = self._call("values", list(rows))
        return values

    def train_critic(self, request: CriticTrainingRequest) -> CriticOutcome:
        """Make the optimizer steps of one iteration.

        Raises:
            ContractError: The request can't be trained on; lists every fault.
            NumericsError: Too many non-finite steps in a row; `row_ids` names their rows.
        """
        self.weights.require_usable()
        check_critic_request(
            request, vocab_size=self._trainer.vocab_size, max_sequence_tokens=self._max_sequence_tokens
        )
        self.weights.policy_version, self.weights.weights_hash = None, None
        outcome: CriticOutcome = self._call("train_critic", request)
        return outcome
