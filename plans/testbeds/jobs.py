"""The jobs of HetRL's evaluation: Qwen3 of one size in every role, GSM8K lengths, 384 prompts (hetrl.md 12.2)."""

from __future__ import annotations

from plans.spec.job import Algorithm, Batch, Job, JobModels, Lengths, Mode, ModelSpec

SIZES = ("4b", "8b", "14b")
PROMPTS = 384
RESPONSES_PER_PROMPT = 8
MAX_TOKENS = 1024


def hetrl_job(size: str, algorithm: Algorithm, mode: Mode) -> Job:
    """Return a job of the evaluation.

    Args:
        size: `4b`, `8b` or `14b` (any suffix of a built-in `qwen3-` shape).
        algorithm: PPO or GRPO.
        mode: sync, or async with a staleness of one version.
    """
    model = ModelSpec(shape=f"qwen3-{size}")
    ppo = algorithm is Algorithm.PPO
    return Job(
        name=f"qwen3-{size}-{algorithm.value}-{mode.value}",
        algorithm=algorithm,
        mode=mode,
        max_staleness=1 if mode is Mode.ASYNC else 0,
        models=JobModels(actor=model, critic=model if ppo else None, reference=model, reward=model),
        batch=Batch(prompts=PROMPTS, responses_per_prompt=RESPONSES_PER_PROMPT),
        lengths=Lengths(prompt=MAX_TOKENS, response=MAX_TOKENS),
    )
