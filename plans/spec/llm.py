"""Shapes of language models and their parameter counts.

Only dense decoder-only transformers with a gated MLP and grouped-query attention are described.
"""

from __future__ import annotations

from types import MappingProxyType

from pydantic import Field

from plans.spec.model import SpecModel

#: Largest count in a job or shape: products of a few of them stay exact.
MOST = 100_000_000


class LlmShape(SpecModel):
    """The numbers of a transformer that the cost and memory models read."""

    layers: int = Field(ge=1, le=MOST)
    """Number of transformer layers (nl)."""
    hidden: int = Field(ge=1, le=MOST)
    """Hidden size (h1)."""
    intermediate: int = Field(ge=1, le=MOST)
    """Inner size of the gated MLP (h2)."""
    heads: int = Field(ge=1, le=MOST)
    """Number of query heads."""
    kv_heads: int = Field(ge=1, le=MOST)
    """Number of key/value heads; divides `heads`."""
    head_dim: int = Field(ge=1, le=MOST)
    """Size of one head."""
    vocab: int = Field(ge=1, le=MOST)
    """Vocabulary size (V)."""
    tied: bool
    """Whether input embedding and output head share one matrix."""

    @property
    def attention_parameters(self) -> int:
        """Weights of q, k, v and o of one layer, with grouped-query attention counted exactly."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Weights of the gated MLP of one layer."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """All weights of one layer, its two norms included (hetrl.md 12.2)."""
        return self.attention_parameters + self.mlp_parameters + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Weights of one vocabulary matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights of the model with a language-model head."""
        matrices = 1 if self.tied else 2
        return self.layers * self.layer_parameters + matrices * self.embedding_parameters + self.hidden

    @property
    def paper_layer_parameters(self) -> int:
        """Weights of one layer as the paper counts them: 4 h1^2 + 3 h1 h2 (HetRL v1, Appendix B)."""
        return 4 * self.hidden * self.hidden + 3 * self.hidden * self.intermediate

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        """Key/value cache elements times two bytes, of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * 2


def _shape(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int, *, tied: bool
) -> LlmShape:
    return LlmShape(layers=layers, hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads,
                    head_dim=head_dim, vocab=vocab, tied=tied)  # fmt: skip


#: Built-in shapes, from the published configuration files of each model family.
BUILT_IN_SHAPES: MappingProxyType[str, LlmShape] = MappingProxyType({
    "qwen3-0.6b": _shape(28, 1024, 3072, 16, 8, 128, 151936, tied=True),
    "qwen3-1.7b": _shape(28, 2048, 6144, 16, 8, 128, 151936, tied=True),
    "qwen3-4b": _shape(36, 2560, 9728, 32, 8, 128, 151936, tied=True),
    "qwen3-8b": _shape(36, 4096, 12288, 32, 8, 128, 151936, tied=False),
    "qwen3-14b": _shape(40, 5120, 17408, 40, 8, 128, 151936, tied=False),
    "qwen3-32b": _shape(64, 5120, 25600, 64, 8, 128, 151936, tied=False),
    "qwen2.5-0.5b": _shape(24, 896, 4864, 14, 2, 64, 151936, tied=True),
    "qwen2.5-1.5b": _shape(28, 1536, 8960, 12, 2, 128, 151936, tied=True),
    "qwen2.5-7b": _shape(28, 3584, 18944, 28, 4, 128, 152064, tied=False),
    "qwen2.5-14b": _shape(48, 5120, 13824, 40, 8, 128, 152064, tied=False),
    "llama3-8b": _shape(32, 4096, 14336, 32, 8, 128, 128256, tied=False),
    "llama3-70b": _shape(80, 8192, 28672, 64, 8, 128, 128256, tied=False),
    "smollm2-135m": _shape(30, 576, 1536, 9, 3, 64, 49152, tied=True),
    "smollm2-360m": _shape(32, 960, 2560, 15, 5, 64, 49152, tied=True),
    "smollm2-1.7b": _shape(24, 2048, 8192, 32, 32, 64, 49152, tied=True),
})  # fmt: skip
