"""What is trained: a model, and rows of unequal lengths in prompt groups."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.step_vs_trl.cases import CASES as TRL_CASES
from plans.spec.llm import LlmShape
from stages.engines.protocol import TrainingRequest, TrainingRow
from stages.models.random_model import make_random_model
from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec
from stages.spec.execution import OptimizerSpec

LEARNING_RATE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison; one optimizer step over all rows."""

    name: str
    shape: LlmShape
    prompts: int
    samples: int
    """Completions of each prompt."""
    prompt_tokens: tuple[int, int]
    """Least and most."""
    completion_tokens: tuple[int, int]
    """Least and most."""
    micro_batch_tokens: int
    """Padded tokens per micro-batch at most."""
    trl_model: str | None = None
    """Case of the benchmark `step_vs_trl` whose model is taken; None = random weights of the shape."""

    def write_model(self, folder: Path) -> Path:
        """Write the model into `folder` and return its directory."""
        if self.trl_model is not None:
            return TRL_CASES[self.trl_model].write_model(folder)
        directory = folder / "model"
        make_random_model("qwen3", self.shape, self.shape.vocab, seed=0).save_pretrained(directory)
        return directory

    def request(self) -> TrainingRequest:
        """Return the optimizer step that every side makes, again and again; the same rows in every process."""
        rng = random.Random(0)
        rows = []
        for prompt in range(self.prompts):
            prompt_ids = self._ids(rng, self.prompt_tokens)
            for sample in range(self.samples):
                completion = self._ids(rng, self.completion_tokens)
                rows.append(
                    TrainingRow(
                        row_id=f"{prompt}/{sample}",
                        prompt_token_ids=prompt_ids,
                        completion_token_ids=completion,
                        advantage=rng.gauss(0.0, 1.0),
                        sampler_logprobs=[-1.0] * len(completion),
                        temperature=1.0,
                    )
                )
        return TrainingRequest(
            rows=rows,
            mini_batches=[list(range(len(rows)))],
            grpo=GrpoSpec(loss_aggregation="token_mean"),
            correction=CorrectionSpec(name="none"),
            optimizer=OptimizerSpec(learning_rate=LEARNING_RATE),
            total_optimizer_steps=1000,
            micro_batch_tokens=self.micro_batch_tokens,
            max_non_finite_steps=1,
        )

    def num_tokens(self) -> int:
        """Tokens of all rows, prompts once per row and without padding."""
        return sum(len(row.prompt_token_ids) + len(row.completion_token_ids) for row in self.request().rows)

    def _ids(self, rng: random.Random, bounds: tuple[int, int]) -> list[int]:
        return [rng.randrange(4, self.shape.vocab) for _ in range(rng.randint(*bounds))]


CASES = {
    case.name: case
    for case in (
        Case(
            name="small",
            shape=LlmShape(
                layers=6, hidden=384, intermediate=1024, heads=6, kv_heads=2, head_dim=64, vocab=4096, tied=True
            ),
            prompts=8, samples=4, prompt_tokens=(24, 48), completion_tokens=(32, 96), micro_batch_tokens=1536,
        ),
        Case(
            name="smollm2",
            shape=TRL_CASES["smollm2"].shape,
            prompts=4, samples=4, prompt_tokens=(24, 48), completion_tokens=(32, 96), micro_batch_tokens=1024,
            trl_model="smollm2",
        ),
    )
}  # fmt: skip
"""Comparisons by name."""
