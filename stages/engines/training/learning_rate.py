"""Learning rate by optimizer step of the run."""

from __future__ import annotations

import math

from stages.spec.execution import OptimizerSpec


def learning_rate_at(optimizer: OptimizerSpec, optimizer_step: int, total_optimizer_steps: int) -> float:
    """Rate of one optimizer step: linear warm-up, then the schedule.

    The first step has peak / warm_up_steps, the warm-up's last step the peak; `linear` and `cosine` then fall to 0 at
    the last step of the run.

    Args:
        optimizer: Peak, warm-up and schedule.
        optimizer_step: Step of the run, from 0.
        total_optimizer_steps: Steps of the whole run.
    """
    done = optimizer_step + 1
    if done <= optimizer.warm_up_steps:
        return optimizer.learning_rate * done / optimizer.warm_up_steps
    if optimizer.schedule == "constant":
        return optimizer.learning_rate
    span = max(total_optimizer_steps - optimizer.warm_up_steps, 1)
    progress = min((done - optimizer.warm_up_steps) / span, 1.0)
    factor = 1.0 - progress if optimizer.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optimizer.learning_rate * factor
