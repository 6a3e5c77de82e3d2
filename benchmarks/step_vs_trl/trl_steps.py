"""GRPO steps with TRL's GRPOTrainer, timed from the end of one step to the end of the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # only in a throwaway environment

from benchmarks.step_vs_trl.cases import Case
from benchmarks.step_vs_trl.clock import Clock, Seconds
from benchmarks.step_vs_trl.reward import reward_of


class _Laps(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    def __init__(self) -> None:
        self.clock = Clock()
        self.laps: list[Seconds] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the library's signature
        self.clock.lap()

    def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the library's signature
        self.laps.append(self.clock.lap())


def _rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:  # noqa: ANN401 - the library's signature
    return [reward_of(ids) for ids in completion_ids]


def _dataset(prompts: list[str]) -> Dataset:
    # With a fingerprint of our own: datasets 5.2 can't hash tables of pyarrow 26 (it pickles MonthDayNano).
    return Dataset(pa.table({"prompt": prompts}), fingerprint="prompts")


def trl_steps(case: Case, model_dir: Path, folder: Path, num_steps: int, learning_rate: float) -> list[Seconds]:
    """Seconds of each of `num_steps` steps; the first one warms up and is left out, so one more is made."""
    batch = case.num_prompts * case.samples_per_prompt
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        per_device_train_batch_size=batch, num_generations=case.samples_per_prompt, gradient_accumulation_steps=1,
        max_completion_length=case.completion_tokens, temperature=1.0, beta=0.0, num_iterations=1, loss_type="grpo",
        generation_kwargs={"min_new_tokens": case.completion_tokens}, learning_rate=learning_rate,
        lr_scheduler_type="constant",
        max_steps=num_steps + 1, save_strategy="no", logging_steps=1000, disable_tqdm=True, weight_decay=0.0,
        adam_beta2=0.99, max_grad_norm=1.0,
    )  # fmt: skip
    laps = _Laps()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        reward_funcs=_rewards,
        args=arguments,
        train_dataset=_dataset(case.prompts() * (num_steps + 2)),
        callbacks=[laps],
    )
    trainer.train()
    return laps.laps[1:]
