"""Rows and requests for tests of the training engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from stages.engines.accelerate_engine import AccelerateEngine
from stages.engines.launch import EngineLaunch
from stages.engines.protocol import TrainingRequest, TrainingRow
from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec
from stages.spec.execution import OptimizerSpec

VOCABULARY = 16


def training_rows(num: int, *, seed: int = 0, has_reference: bool = False) -> list[TrainingRow]:
    """Rows of unequal lengths with plausible log-probs."""
    rng = random.Random(seed)
    rows = []
    for index in range(num):
        prompt = [1, *(rng.randrange(4, VOCABULARY) for _ in range(rng.randrange(1, 9)))]
        completion = [rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(1, 10))]
        rows.append(
            TrainingRow(
                row_id=f"row-{index}",
                prompt_token_ids=prompt,
                completion_token_ids=completion,
                advantage=rng.gauss(0.0, 1.0),
                sampler_logprobs=[-rng.uniform(1.0, 4.0) for _ in completion],
                temperature=rng.choice([0.7, 1.0]),
                reference_logprobs=[-rng.uniform(1.0, 4.0) for _ in completion] if has_reference else None,
            )
        )
    return rows


def training_request(rows: list[TrainingRow], **changes: Any) -> TrainingRequest:
    """Two optimizer steps over the rows, unless told otherwise."""
    half = len(rows) // 2
    fields: dict[str, Any] = {
        "rows": rows,
        "mini_batches": [list(range(half)), list(range(half, len(rows)))],
        "grpo": GrpoSpec(),
        "correction": CorrectionSpec(),
        # A large epsilon: else Adam turns rounding of tiny gradients into full steps.
        "optimizer": OptimizerSpec(learning_rate=1e-3, weight_decay=0.1, eps=1e-3),
        "total_optimizer_steps": 20,
        "micro_batch_tokens": 64,
        "max_non_finite_steps": 3,
        "max_response_tokens": 10,
    }
    return TrainingRequest(**{**fields, **changes})


def training_launch(**options: Any) -> EngineLaunch:
    """A launch of the accelerate engine on CPU."""
    return EngineLaunch(
        role="training", name="accelerate", run="test", machine="here", max_prompt_tokens=32, max_completion_tokens=32,
        dtype="fp32", options=options,
    )  # fmt: skip


def training_engine(model_dir: Path, **options: Any) -> AccelerateEngine:
    """An engine that holds version 0 of a model directory."""
    engine = AccelerateEngine(training_launch(**options), model_dir)
    engine.load_checkpoint(model_dir, None, 0, "hash-0")
    return engine
