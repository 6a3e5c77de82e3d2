"""The optimizer steps of a policy, whatever library holds its weights; all ranks run the same methods together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from stages.engines.protocol import OptimizerStepMetrics, ScoredTokens, TrainingOutcome, TrainingRequest
from stages.engines.training.learning_rate import learning_rate_at
from stages.engines.training.non_finite import stop_after_too_many
from stages.engines.training.optimizer_step import MicroBatch, StepResult, count_normaliser, make_micro_batches
from stages.engines.training.rank_group import RankGroup
from stages.engines.training.resume_point import TrainerCounts
from stages.engines.training.row_tensors import Row, row_length
from stages.engines.training.start_logprobs import StartLogprobs
from stages.rl.aggregation import Normaliser
from stages.spec.execution import OptimizerSpec


class PolicySteps(ABC):
    """Trains and scores a causal language model; a subclass knows how gradients are made and applied."""

    counts: TrainerCounts
    """What the trainer counts over the whole run."""

    @property
    @abstractmethod
    def group(self) -> RankGroup:
        """All ranks; of those that compute the same rows together, one counts."""

    @abstractmethod
    def my_rows(self, row_indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Return which of some rows this rank computes; ranks that compute the same rows together get the same."""

    @abstractmethod
    def score_into(self, scores: StartLogprobs, rows: Sequence[Row], row_indices: Sequence[int]) -> None:
        """Compute the log-probs of some rows and share them with all ranks."""

    @abstractmethod
    def set_rate(self, spec: OptimizerSpec, learning_rate: float) -> None:
        """Set what the next update uses."""

    @abstractmethod
    def backward(
        self, micro_batches: Sequence[MicroBatch], request: TrainingRequest, normaliser: Normaliser,
        start: StartLogprobs,
    ) -> StepResult:  # fmt: skip
        """Make the clipped gradient of an optimizer step from this rank's micro-batches."""

    @abstractmethod
    def finish_step(self, *, is_applied: bool) -> None:
        """Update the weights, or leave them alone, and drop the gradient."""

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Log-probs of the completion tokens, [rows][completion tokens]."""
        scores = StartLogprobs(rows, self.group.device)
        self.score_into(scores, rows, range(len(rows)))
        return scores.to_lists()

    def train(self, request: TrainingRequest) -> TrainingOutcome:
        """Make every optimizer step of the request."""
        start = StartLogprobs(request.rows, self.group.device)
        self.score_into(start, request.rows, _rows_to_score(request))
        steps: list[OptimizerStepMetrics] = []
        skipped: list[str] = []
        for place, mini_batch in enumerate(request.mini_batches):
            step = self._optimizer_step(request, mini_batch, start)
            if place == 0 and not start.knows(mini_batch):
                start.share(mini_batch, self.group)
            steps.append(step)
            if step.is_skipped:
                skipped += [request.rows[row].row_id for row in mini_batch]
                stop_after_too_many(self.counts, request.max_non_finite_steps, skipped)
        return TrainingOutcome(steps=steps, trainer_logprobs=start.to_lists(), skipped_row_ids=tuple(skipped))

    def _optimizer_step(
        self, request: TrainingRequest, mini_batch: Sequence[int], start: StartLogprobs
    ) -> OptimizerStepMetrics:
        index = self.counts.optimizer_step
        rate = learning_rate_at(request.optimizer, index, request.total_optimizer_steps)
        mine = self.my_rows(mini_batch, [row_length(row) for row in request.rows])
        micro_batches = make_micro_batches(request, mini_batch, mine, start, self.group.device)
        normaliser = count_normaliser(micro_batches, self.group, float(request.max_response_tokens or 1))
        self.set_rate(request.optimizer, rate)
        result = self.backward(micro_batches, request, normaliser, start)
        self.finish_step(is_applied=result.is_finite)
        in_a_row = 0 if result.is_finite else self.counts.non_finite_in_a_row + 1
        self.counts = replace(self.counts, optimizer_step=index + 1, non_finite_in_a_row=in_a_row)
        return _step_metrics(result, index, rate, len(mini_batch))


def _rows_to_score(request: TrainingRequest) -> list[int]:
    """Rows that need a forward pass of their own before the first optimizer step.

    The first step's rows don't: its own forward pass runs under the same weights. A masking correction is the
    exception, since it changes the counts that the first step's loss is divided by.
    """
    first = set() if request.correction.changes_counts else set(request.mini_batches[0])
    return [row for row in range(len(request.rows)) if row not in first]


def _step_metrics(result: StepResult, index: int, rate: float, num_rows: int) -> OptimizerStepMetrics:
    values = {**result.sums.metrics(), "grad_norm": result.grad_norm, "learning_rate": rate}
    return OptimizerStepMetrics(
        optimizer_step=index,
        is_skipped=not result.is_finite,
        num_rows=num_rows,
        num_tokens=int(result.sums.parts["num_tokens"]),
        values=values,
    )
