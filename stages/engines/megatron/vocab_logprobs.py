"""Log-probs and entropy of chosen tokens where each rank has the logits of a part of the vocabulary.

As in `stages.rl.chunked_logprobs`, logits exist for one chunk of tokens at a time and are made again in the backward
pass. What the ranks exchange is a few numbers per token: the largest logit, the sum of exponentials, the chosen logit.

Legend of shapes: N tokens, C tokens of a chunk, H hidden size, V tokens of the vocabulary on this rank (may be 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from stages.rl.matrix_products import product


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """The part of the vocabulary that a rank has."""

    first: int
    """Its first token id."""
    size: int
    """Tokens in it, padding left out."""
    group: Any = None
    """Process group of all parts; None = there is one part."""


def sharded_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    shard: VocabShard,
    *,
    chunk_tokens: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` (and the entropy) under softmax(logits / temperature), fp32 [N], equal on all ranks.

    The gradient for `hidden` is this rank's part of a sum over ranks; the caller's region function adds them up.

    Args:
        hidden: [N, H], final hidden states, the same on all ranks.
        head_weight: [at least V, H], rows of this rank; rows from V on are padding.
        targets: [N], token ids.
        temperatures: [N], > 0.
        shard: This rank's part of the vocabulary.
        chunk_tokens: Tokens whose logits exist at once.
        with_entropy: Whether to compute the entropy too.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _ShardedLogprobs.apply
    logprobs, entropy = apply(
        hidden, head_weight[: shard.size], targets, temperatures, shard, chunk_tokens, with_entropy
    )
    return logprobs, entropy if with_entropy else None


class _ShardedLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped where mypy runs
    """Forward: statistics of each token's logits. Backward: logits of each chunk again, then their gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context object
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        shard: VocabShard,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        log_totals, entropy = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for part in _chunks(hidden.shape[0], chunk_tokens):
            logits = _tempered_logits(hidden[part], weight, temperatures[part])
            largest = _reduced(_largest(logits), dist.ReduceOp.MAX, shard)
            shifted = logits - largest.unsqueeze(-1)
            exponentials = shifted.exp()
            sums = [exponentials.sum(dim=-1), _chosen(shifted, targets[part], shard)]
            if with_entropy:
                sums.append((exponentials * shifted).sum(dim=-1))
            total, chosen, *weighted = _reduced(torch.stack(sums), dist.ReduceOp.SUM, shard).unbind()
            logprobs[part] = chosen - total.log()
            log_totals[part] = largest + total.log()
            if with_entropy:
                entropy[part] = total.log() - weighted[0] / total
        ctx.save_for_backward(hidden, weight, targets, temperatures, log_totals, entropy)
        ctx.options = (shard, chunk_tokens, with_entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, targets, temperatures, log_totals, entropy = ctx.saved_tensors
        shard, chunk_tokens, with_entropy = ctx.options
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in _chunks(hidden.shape[0], chunk_tokens):
            log_softmax = _tempered_logits(hidden[part], weight, temperatures[part]) - log_totals[part].unsqueeze(-1)
            # By the logit of token j: of the log-prob of y 1[j = y] - p_j, of the entropy E -p_j (log p_j + E).
            by_token = grad_logprobs[part].unsqueeze(-1)
            grad = -log_softmax.exp() * by_token
            if with_entropy:
                by_entropy, total = grad_entropy[part].unsqueeze(-1), entropy[part].unsqueeze(-1)
                grad -= log_softmax.exp() * by_entropy * (log_softmax + total)
            place, is_here = _places(targets[part], shard)
            if shard.size:
                grad.scatter_add_(-1, place.unsqueeze(-1), (by_token.squeeze(-1) * is_here).unsqueeze(-1))
                grad = (grad / temperatures[part].unsqueeze(-1)).to(hidden.dtype)
                grad_hidden[part] = product(grad, weight)
                grad_weight += product(grad.t(), hidden[part]).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


def _tempered_logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """Logits [C, V], fp32."""
    if not weight.shape[0]:
        return hidden.new_zeros((hidden.shape[0], 0), dtype=torch.float32)
    return product(hidden, weight.t()).float() / temperatures.unsqueeze(-1)


def _largest(logits: Tensor) -> Tensor:
    if not logits.shape[1]:
        return logits.new_full((logits.shape[0],), -torch.inf)
    return logits.amax(dim=-1)


def _places(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Place of each target in this part of the vocabulary, 0 for those of others, and which are here."""
    place = targets - shard.first
    is_here = (place >= 0) & (place < shard.size)
    return torch.where(is_here, place, 0), is_here


def _chosen(shifted: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    place, is_here = _places(targets, shard)
    if not shard.size:
        return torch.zeros_like(targets, dtype=torch.float32)
    return torch.where(is_here, shifted.gather(-1, place.unsqueeze(-1)).squeeze(-1), 0.0)


def _reduced(values: Tensor, operation: Any, shard: VocabShard) -> Tensor:  # noqa: ANN401 - an enumeration of torch's
    if shard.group is not None:
        dist.all_reduce(values, op=operation, group=shard.group)
    return values
