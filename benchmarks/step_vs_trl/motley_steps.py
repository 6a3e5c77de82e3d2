"""GRPO steps with Motley's engines, in process."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.step_vs_trl.cases import Case
from benchmarks.step_vs_trl.clock import Clock, Seconds
from benchmarks.step_vs_trl.reward import reward_of
from stages.engines.accelerate_engine import AccelerateEngine
from stages.engines.launch import EngineLaunch, Role
from stages.engines.protocol import Completion, GenerationRequest, TrainingRequest, TrainingRow
from stages.engines.transformers_engine import TransformersEngine
from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec
from stages.spec.execution import OptimizerSpec


class MotleySteps:
    """Both engines on one model."""

    def __init__(self, case: Case, model_dir: Path, folder: Path, threads: int, learning_rate: float) -> None:
        self._case, self._folder = case, folder
        self._optimizer = OptimizerSpec(learning_rate=learning_rate)
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._prompts = [tokenizer.encode(prompt) for prompt in case.prompts()]
        self._sampler = TransformersEngine(self._launch("generation", "transformers", threads), model_dir)
        self._trainer = AccelerateEngine(self._launch("training", "accelerate", threads), model_dir)
        self._sampler.load_weights(model_dir, 0, "start")
        self._trainer.load_checkpoint(model_dir, None, 0, "start")
        self._version = 0

    def step(self) -> dict[str, Seconds]:
        """Make one step and return the time of its parts."""
        clock = Clock()
        completions = self._sampler.generate(self._requests())
        generated = clock.lap()
        self._trainer.train(self._training_request(completions))
        trained = clock.lap()
        self._publish()
        synced = clock.lap()
        return {"generation": generated, "training": trained, "sync": synced}

    def close(self) -> None:
        """Free both engines."""
        self._sampler.close()
        self._trainer.close()

    def _launch(self, role: Role, name: str, threads: int) -> EngineLaunch:
        case = self._case
        return EngineLaunch(
            role=role, name=name, run="benchmark", machine="here", threads=threads, dtype="fp32",
            max_prompt_tokens=max(len(ids) for ids in self._prompts), max_completion_tokens=case.completion_tokens,
            max_num_seqs=case.num_prompts * case.samples_per_prompt,
        )  # fmt: skip

    def _requests(self) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                prompt_token_ids=ids,
                seed=self._version * 1_000_003 + place * self._case.samples_per_prompt + sample,
                max_tokens=self._case.completion_tokens,
                temperature=1.0,
            )
            for place, ids in enumerate(self._prompts)
            for sample in range(self._case.samples_per_prompt)
        ]

    def _training_request(self, completions: list[Completion]) -> TrainingRequest:
        size = self._case.samples_per_prompt
        rewards = [reward_of(list(completion.token_ids)) for completion in completions]
        rows = []
        for place, completion in enumerate(completions):
            group = rewards[place // size * size : (place // size + 1) * size]
            rows.append(
                TrainingRow(
                    row_id=str(place),
                    prompt_token_ids=self._prompts[place // size],
                    completion_token_ids=completion.token_ids,
                    advantage=(rewards[place] - sum(group) / size) / 0.5,
                    sampler_logprobs=completion.logprobs,
                    temperature=1.0,
                )
            )
        return TrainingRequest(
            rows=rows,
            mini_batches=[list(range(len(rows)))],
            grpo=GrpoSpec(),
            correction=CorrectionSpec(),
            optimizer=self._optimizer,
            total_optimizer_steps=1000,
            micro_batch_tokens=2048,
            max_non_finite_steps=1,
        )

    def _publish(self) -> None:
        self._version += 1
        policy, trainer = self._folder / "policy", self._folder / "trainer"
        for path in (policy, trainer):
            shutil.rmtree(path, ignore_errors=True)
        self._trainer.save(policy, trainer, self._version)
        self._sampler.load_weights(policy, self._version, str(self._version))
