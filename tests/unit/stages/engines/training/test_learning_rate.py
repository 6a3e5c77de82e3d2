from __future__ import annotations

import pytest

from stages.engines.training.learning_rate import learning_rate_at
from stages.spec.execution import OptimizerSpec


def rates(schedule: str, warm_up_steps: int, total: int) -> list[float]:
    spec = OptimizerSpec(learning_rate=1.0, warm_up_steps=warm_up_steps, schedule=schedule)
    return [learning_rate_at(spec, step, total) for step in range(total)]


def test_learning_rate_constant_rises_then_stays():
    assert rates("constant", 4, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_learning_rate_without_warm_up_starts_at_the_peak():
    assert rates("constant", 0, 2) == [1.0, 1.0]


def test_learning_rate_linear_reaches_zero_at_the_last_step():
    assert rates("linear", 2, 6) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_learning_rate_cosine_reaches_zero_at_the_last_step():
    assert rates("cosine", 0, 4) == pytest.approx([0.8535533905932737, 0.5, 0.14644660940672627, 0.0])


def test_learning_rate_beyond_the_run_stays_zero():
    assert learning_rate_at(OptimizerSpec(learning_rate=1.0, schedule="linear"), 9, 5) == 0.0
