"""A causal language model as the trainer sees it: token ids in, log-probs and entropy of given tokens out.

Models with plain attention run on distinct tokens only (see `row_attention`), others on padded rows. The head is
applied to the hidden states of completion tokens only, chunk by chunk, so the logits of a batch never exist at once.
Dropout is off everywhere: the importance ratio compares two passes of one function.

Legend of shapes: U distinct tokens, B rows, L padded length, N completion tokens of all rows, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from stages.engines.training import row_attention
from stages.engines.training.decoder_states import completion_states, disable_dropout
from stages.errors import EngineError
from stages.rl.chunked_logprobs import chunked_logprobs
from stages.rl.matrix_products import use_products_in

HEAD_TOLERANCE = 1e-3
"""Largest allowed gap in nats between our head and the model's own, in fp32 (rounding is about 1e-5)."""


class PolicyModule(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Wraps a transformers causal language model; the only module that data-parallel wrappers see."""

    def __init__(self, model: Any, chunk_tokens: int) -> None:  # noqa: ANN401 - transformers has no useful type
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.shares_prompts = model.config._attn_implementation == row_attention.NAME
        self.logit_softcap: float | None = getattr(model.config, "final_logit_softcapping", None)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        row_places: Tensor,
        token_owners: Tensor,
        hidden_index: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropy of `targets`, both fp32 [N]; entropy is None unless asked for.

        Args:
            token_ids: [U].
            positions: [U], in the row.
            row_places: [B, L], places in `token_ids`; anything behind a row's end.
            token_owners: [U], a position of each token in the flattened [B * L].
            hidden_index: [N], positions in the flattened [B * L].
            targets: [N].
            temperatures: [N].
            with_entropy: Whether to compute the entropy.
        """
        hidden = completion_states(
            self.model.get_decoder(), token_ids, positions, row_places, token_owners, hidden_index,
            shares_prompts=self.shares_prompts,
        )  # fmt: skip
        head = self.model.get_output_embeddings()
        return chunked_logprobs(
            hidden,
            head.weight,
            targets,
            temperature=temperatures,
            head_bias=head.bias,
            logit_softcap=self.logit_softcap,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
        )


def load_policy_module(
    model_dir: Path, *, dtype: torch.dtype, is_recomputing: bool, chunk_tokens: int, device: torch.device
) -> PolicyModule:
    """Load a Hugging Face directory, switch dropout off and prove that our head is the model's.

    Args:
        model_dir: Config and safetensors.
        dtype: Type of the weights in memory.
        is_recomputing: Whether activations are recomputed in the backward pass.
        chunk_tokens: Tokens whose logits exist at once.
        device: Where the weights go.

    Raises:
        EngineError: The model does something to its logits that this engine doesn't.
    """
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    attention = row_attention.NAME if row_attention.supports_row_attention(config) else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, config=config, dtype=dtype, local_files_only=True, use_safetensors=True,
        attn_implementation=attention,
    ).to(device)  # fmt: skip
    disable_dropout(model)
    use_products_in(model)
    module = PolicyModule(model, chunk_tokens)
    _check_head(module, device)
    if is_recomputing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers recomputes activations in training mode only.
    module.train()
    return module


def _check_head(module: PolicyModule, device: torch.device) -> None:
    """Compare with the model's own logits on a few tokens: some families scale or shift them after the head."""
    vocab = module.model.config.get_text_config().vocab_size
    ids = (torch.arange(8, device=device) * 7919 % vocab).unsqueeze(0)
    places, targets = torch.arange(8, device=device), ids[0, 1:]
    with torch.no_grad():
        temperatures = torch.ones(7, device=device)
        ours, _ = module(ids[0], places, places.unsqueeze(0), places, places[:7], targets, temperatures, False)
        theirs = module.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    gap = float((ours - theirs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).abs().max())
    # In bf16 both sides round the same products, so a real difference is far larger than the rounding there, too.
    tolerance = HEAD_TOLERANCE if ours.dtype == module.model.dtype else 0.2
    if not gap <= tolerance:
        raise EngineError(
            f"the accelerate engine's log-probs differ by {gap:.3g} nats from those of "
            f"{type(module.model).__name__}: this family changes its logits after the head, which the engine doesn't "
            "support; use another model family",
            gap=gap,
        )
