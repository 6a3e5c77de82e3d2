"""When too many optimizer steps in a row were skipped."""

from __future__ import annotations

from collections.abc import Sequence

from stages.engines.training.resume_point import TrainerCounts
from stages.errors import NumericsError


def stop_after_too_many(counts: TrainerCounts, limit: int, skipped: Sequence[str]) -> None:
    """Give up when too many optimizer steps in a row were skipped.

    Args:
        counts: After the last step.
        limit: Non-finite steps in a row that are too many.
        skipped: Rows of the skipped steps.

    Raises:
        NumericsError: There were as many as `limit`.
    """
    count = counts.non_finite_in_a_row
    if count < limit:
        return
    raise NumericsError(
        f"loss or gradient was not finite in {count} optimizer steps in a row (allowed: fewer than {limit}), last "
        f"in step {counts.optimizer_step - 1}: look at the rows named in row_ids, lower the learning rate, or "
        "resume from an earlier policy version",
        row_ids=list(skipped),
        optimizer_step=counts.optimizer_step - 1,
        num_steps=count,
    )
