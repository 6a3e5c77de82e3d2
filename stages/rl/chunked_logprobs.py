"""Log-probs and entropy of chosen tokens from hidden states, without ever holding the logits of the whole batch.

The hidden states are cut into chunks of tokens; a chunk's logits exist while its log-probs are computed and, made
again, while its gradient is computed. Peak memory is that of one chunk's logits instead of N * V, for a third more
arithmetic in the head. The gradient is written out by hand, since automatic differentiation would keep several arrays
of a chunk's logits at a time and a gradient of the head weight per chunk.

Legend of shapes: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.rl.matrix_products import product


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What the pass needs beside tensors."""

    logit_softcap: float | None
    chunk_tokens: int
    with_entropy: bool


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
    different number (prime-rl#697). The matrix product runs in the dtype of `hidden` (under autocast: in autocast's),
    all that follows in fp32.

    Args:
        hidden: [N, H], final hidden states after the last norm.
        head_weight: [V, H], weight of the language-model head.
        targets: [N], int64 token ids in [0, V).
        temperature: > 0; a number, or [N], one per token. No gradient flows into it.
        head_bias: [V] or None.
        logit_softcap: c of c * tanh(logits / c) of models that cap their final logits; None = no cap.
        chunk_tokens: Tokens per chunk, >= 1; trades memory for calls, not the result.
        with_entropy: Whether to compute the entropy too.

    Returns:
        Log-probs [N] and entropy [N] (None without `with_entropy`), both in fp32 and differentiable once.
    """
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(hidden.shape[0])
    if torch.is_autocast_enabled(hidden.device.type):
        # Autocast is off in a backward pass, where the logits are made again; so it is applied here, once for both.
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, head_weight = hidden.to(dtype), head_weight.to(dtype)
        head_bias = None if head_bias is None else head_bias.to(dtype)
    options = _Options(logit_softcap=logit_softcap, chunk_tokens=chunk_tokens, with_entropy=with_entropy)
    with torch.autocast(hidden.device.type, enabled=False):
        # Typed here, since torch leaves `apply` untyped.
        apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogprobs.apply
        logprobs, entropy = apply(hidden, head_weight, head_bias, targets, temperatures, options)
    return logprobs, entropy if with_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):  # type: ignore[misc] # torch is untyped where mypy runs
    """Forward: log-prob and entropy of each token. Backward: logits of each chunk again, then their gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context object
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs) if options.with_entropy else logprobs.new_empty(0)
        ctx.last_chunk = None
        for part in _chunks(hidden.shape[0], options):
            logits, cap_slope = _tempered_logits(hidden[part], weight, bias, temperatures[part], options)
            # Shifted by the largest, so that nothing overflows and the differences below are of small numbers.
            logits -= logits.amax(dim=-1, keepdim=True)
            log_total = logits.logsumexp(dim=-1)
            logprobs[part] = logits.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1) - log_total
            if options.with_entropy:
                entropy[part] = log_total - torch.linalg.vecdot(torch.softmax(logits, dim=-1), logits)
            if part.stop >= hidden.shape[0] and any(ctx.needs_input_grad):
                ctx.last_chunk = (logits, cap_slope)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, entropy)
        ctx.options = options
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, bias, targets, temperatures, entropy = ctx.saved_tensors
        options: _Options = ctx.options
        has_entropy_gradient = options.with_entropy and bool(grad_entropy.any())
        # fp32, so that many chunks of a bf16 head add up without loss.
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for part in reversed(_chunks(hidden.shape[0], options)):
            if ctx.last_chunk is not None:
                (logits, cap_slope), ctx.last_chunk = ctx.last_chunk, None
            else:
                logits, cap_slope = _tempered_logits(hidden[part], weight, bias, temperatures[part], options)
            grad = _logit_gradient(
                logits,
                targets[part],
                grad_logprobs[part],
                (grad_entropy[part], entropy[part]) if has_entropy_gradient else None,
            )
            grad /= temperatures[part].unsqueeze(-1)
            if cap_slope is not None:
                grad *= cap_slope
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(hidden.dtype)
            grad_hidden[part] = product(grad, weight)
            if ctx.needs_input_grad[1]:
                share = product(grad.t(), hidden[part]).float()
                grad_weight = share if grad_weight is None else grad_weight.add_(share)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _chunks(num_tokens: int, options: _Options) -> list[slice]:
    return [slice(start, start + options.chunk_tokens) for start in range(0, num_tokens, options.chunk_tokens)]


def _tempered_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor, options: _Options
) -> tuple[Tensor, Tensor | None]:
    """Logits [C, V] after cap and temperature, fp32, of their own; and the slope of the cap, if there is one."""
    logits = product(hidden, weight.t()).float()
    if bias is not None:
        logits += bias
    slope: Tensor | None = None
    if options.logit_softcap is not None:
        capped = torch.tanh(logits / options.logit_softcap)
        slope = 1.0 - capped.square()
        logits = options.logit_softcap * capped
    logits /= temperatures.unsqueeze(-1)
    return logits, slope


def _logit_gradient(
    logits: Tensor, targets: Tensor, grad_logprobs: Tensor, entropy_part: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient by the tempered logits z [C, V], with p = softmax(z).

    Of the log-prob of token y: 1[j = y] - p_j. Of the entropy E: -p_j (log p_j + E).
    """
    if entropy_part is None:
        grad = torch.softmax(logits, dim=-1)
        grad *= -grad_logprobs.unsqueeze(-1)
    else:
        grad_entropy, entropy = (values.unsqueeze(-1) for values in entropy_part)
        log_softmax = torch.log_softmax(logits, dim=-1)
        probabilities = log_softmax.exp()
        grad = -probabilities * (grad_logprobs.unsqueeze(-1) + grad_entropy * (log_softmax + entropy))
    grad.scatter_add_(-1, targets.unsqueeze(-1), grad_logprobs.unsqueeze(-1))
    return grad
