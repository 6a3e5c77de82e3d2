"""What the training engines of a policy share, whatever library its ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.engines.protocol import AdapterBase, ScoredTokens, TrainingOutcome, TrainingRequest
from stages.engines.training.ranked_engine import RankedEngine
from stages.engines.training.request_checks import check_rows, check_training_request


class PolicyEngine(RankedEngine):
    """Implements `TrainingEngine` and `ScoringEngine`."""

    def load_weights(
        self, directory: Path, policy_version: int, weights_hash: str, base: AdapterBase | None = None
    ) -> None:
        """Replace the weights in place; optimizer and counts start anew."""
        self.load_checkpoint(directory, None, policy_version, weights_hash, base)

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Log-prob of each completion token, at the row's temperature, [rows][completion tokens]."""
        self.weights.require_usable()
        check_rows(rows, vocab_size=self._trainer.vocab_size, max_sequence_tokens=self._max_sequence_tokens)
        scores: list[list[float]] = self._call("score", list(rows))
        return scores

    def train(self, request: TrainingRequest) -> TrainingOutcome:
        """Make the optimizer steps of one iteration.

        Rows of later optimizer steps get their log-probs under the starting weights from a pass of their own; rows of
        the first step get them from that step's own forward pass, so a single on-policy step costs one pass.

        Raises:
            ContractError: The request can't be trained on; lists every fault.
            NumericsError: Too many non-finite steps in a row; `row_ids` names their rows.
        """
        self.weights.require_usable()
        check_training_request(
            request, vocab_size=self._trainer.vocab_size, max_sequence_tokens=self._max_sequence_tokens
        )
        self.weights.policy_version, self.weights.weights_hash = None, None
        outcome: TrainingOutcome = self._call("train", request)
        return outcome
