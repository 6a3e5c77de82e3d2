"""Critics, rows and requests for tests of the critic engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from plans.spec.llm import LlmShape
from stages.engines.accelerate_critic import AccelerateCritic
from stages.engines.launch import EngineLaunch
from stages.engines.protocol import CriticRow, CriticTrainingRequest, ScoredTokens
from stages.models.scalar_heads import write_first_critic
from stages.spec.execution import OptimizerSpec
from tests.helpers.training_cases import VOCABULARY

TINY_SHAPE = LlmShape(
    layers=2, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, vocab=VOCABULARY, tied=True
)


def save_critic(model_dir: Path, out_dir: Path, *, seed: int = 0) -> Path:
    """Write the critic of a tiny model with a random head, so that its values differ; return `out_dir`."""
    write_first_critic(model_dir, TINY_SHAPE, out_dir)
    tensors = load_file(out_dir / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors["score.weight"] = 0.1 * torch.randn(tensors["score.weight"].shape, generator=generator)
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    return out_dir


def critic_engine(critic_dir: Path, **options: Any) -> AccelerateCritic:
    """An engine that holds version 0 of a critic."""
    launch = EngineLaunch(
        role="critic", name="accelerate", run="test", machine="here", max_prompt_tokens=32, max_completion_tokens=32,
        dtype="fp32", options=options,
    )  # fmt: skip
    engine = AccelerateCritic(launch, critic_dir)
    engine.load_checkpoint(critic_dir, None, 0, "hash-0")
    return engine


def critic_rows(num: int, *, seed: int = 0) -> list[CriticRow]:
    """Rows of unequal lengths, some of one prompt, with plausible targets."""
    rng = random.Random(seed)
    prompts = [[1, *(rng.randrange(4, VOCABULARY) for _ in range(rng.randrange(1, 9)))] for _ in range(num // 2 + 1)]
    rows = []
    for index in range(num):
        completion = [rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(1, 10))]
        rows.append(
            CriticRow(
                row_id=f"row-{index}",
                prompt_token_ids=prompts[index // 2],
                completion_token_ids=completion,
                old_values=[rng.gauss(0.0, 0.2) for _ in completion],
                returns=[rng.gauss(0.5, 0.5) for _ in completion],
            )
        )
    return rows


def critic_request(rows: list[CriticRow], **changes: Any) -> CriticTrainingRequest:
    """Two optimizer steps over the rows, unless told otherwise."""
    half = len(rows) // 2
    fields: dict[str, Any] = {
        "rows": rows,
        "mini_batches": [list(range(half)), list(range(half, len(rows)))],
        "value_clip": 0.2,
        "value_weight": 0.5,
        # A large epsilon: else Adam turns rounding of tiny gradients into full steps.
        "optimizer": OptimizerSpec(learning_rate=1e-3, weight_decay=0.1, eps=1e-3),
        "total_optimizer_steps": 20,
        "micro_batch_tokens": 64,
        "max_non_finite_steps": 3,
    }
    return CriticTrainingRequest(**{**fields, **changes})


def scored(rows: list[CriticRow]) -> list[ScoredTokens]:
    """The rows as a critic is asked about them."""
    return [
        ScoredTokens(prompt_token_ids=row.prompt_token_ids, completion_token_ids=row.completion_token_ids)
        for row in rows
    ]


def edit_config(directory: Path, **changes: Any) -> None:
    """Change fields of a config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
