"""Work of a transformer layer in FLOP per sample, as published and exact.

Legend: s tokens, h1 hidden size, h2 intermediate size, V vocabulary.
"""

from __future__ import annotations

from plans.spec.llm import LlmShape


def paper_layer_flop(shape: LlmShape, num_tokens: float) -> float:
    """Return forward FLOP of one layer for one sample: 8 s h1^2 + 4 s^2 h1 + 6 s h1 h2 (HetRL v1, Appendix B)."""
    s, h1, h2 = num_tokens, float(shape.hidden), float(shape.intermediate)
    return 8.0 * s * h1 * h1 + 4.0 * s * s * h1 + 6.0 * s * h1 * h2


def exact_layer_flop(shape: LlmShape, mean_tokens: float, mean_square_tokens: float) -> float:
    """Return forward FLOP of one layer for one sample, with grouped-query attention and causal masking.

    2 s (attention + MLP weights) + 2 s^2 heads head_dim: QK^T and PV are 4 s^2 heads head_dim, halved by the mask
    (hetrl.md 4.8, reconstruction).
    """
    weights = shape.attention_parameters + shape.mlp_parameters
    return 2.0 * mean_tokens * weights + 2.0 * mean_square_tokens * shape.heads * shape.head_dim


def head_flop(shape: LlmShape, num_tokens: float) -> float:
    """Return forward FLOP of the vocabulary head for one sample: 2 s h1 V (hetrl.md 4.8)."""
    return 2.0 * num_tokens * shape.hidden * shape.vocab
