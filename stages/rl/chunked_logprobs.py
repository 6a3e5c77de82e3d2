"""Log-probs and entropy of chosen tokens from hidden states, without ever holding the logits of the whole batch.

The hidden states are cut into chunks of tokens; a chunk's logits exist while its log-probs are computed and, made
again, while its gradient is computed. Peak memory is that of one chunk's logits instead of N * V.

Legend of shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.rl.entropy import entropy_of_log_softmax


def chunked_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    head_bias: Tensor | None = None,
    logit_softcap: float | None = None,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` (and the entropy) under softmax(logits / temperature), in fp32.

    The temperature divides the logits before the softmax, as the sampler does; dividing log-probs instead is a
    different number (prime-rl#697). The matrix product runs in the dtype of `hidden`, all that follows in fp32.

    Args:
        hidden: [N, H], final hidden states after the last norm.
        head_weight: [V, H], weight of the language-model head.
        targets: [N], int64 token ids in [0, V).
        temperature: > 0; a number, or [N], one per token.
        head_bias: [V] or None.
        logit_softcap: c of c * tanh(logits / c) of models that cap their final logits; None = no cap.
        chunk_tokens: Tokens per chunk, >= 1; trades memory for calls, not the result.
        with_entropy: Whether to compute the entropy too.

    Returns:
        Log-probs [N] and entropy [N] (None without `with_entropy`), both in fp32 and differentiable.
    """
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(hidden.shape[0])
    logprobs: list[Tensor] = [hidden.new_zeros(0, dtype=torch.float32)]
    entropies: list[Tensor] = [hidden.new_zeros(0, dtype=torch.float32)]
    for start in range(0, hidden.shape[0], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        chunk_logprobs, chunk_entropy = checkpoint(
            _score_chunk,
            hidden[part],
            head_weight,
            head_bias,
            targets[part],
            temperatures[part],
            logit_softcap,
            with_entropy,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        logprobs.append(chunk_logprobs)
        entropies.append(chunk_entropy)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _score_chunk(
    hidden: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    logit_softcap: float | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, head_weight, head_bias).float()
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    log_softmax = torch.log_softmax(logits / temperatures.unsqueeze(-1), dim=-1)
    chosen = log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen, entropy_of_log_softmax(log_softmax) if with_entropy else chosen.new_zeros(0)
