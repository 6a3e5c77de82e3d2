"""A critic as the trainer sees it: token ids in, one value per completion token out.

The model is transformers' token classifier with one label: a decoder and a linear head. The value of a completion token
is read where the token is predicted, so it is the value of the state before that token.

Legend of shapes: U distinct tokens, B rows, L padded length, N completion tokens of all rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForTokenClassification
from transformers.utils import logging as transformers_logging

from stages.engines.training import row_attention
from stages.engines.training.decoder_states import completion_states, disable_dropout
from stages.errors import EngineError
from stages.rl.matrix_products import use_products_in


class ValueModule(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Wraps a token classifier with one label; the only module that data-parallel wrappers see."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - transformers has no useful type
        super().__init__()
        self.model = model
        self.shares_prompts = model.config._attn_implementation == row_attention.NAME

    def forward(
        self, token_ids: Tensor, positions: Tensor, row_places: Tensor, token_owners: Tensor, hidden_index: Tensor
    ) -> Tensor:
        """Values, fp32 [N]; arguments as for `completion_states`."""
        hidden = completion_states(
            self.model.base_model, token_ids, positions, row_places, token_owners, hidden_index,
            shares_prompts=self.shares_prompts,
        )  # fmt: skip
        head = self.model.score
        with torch.autocast(hidden.device.type, enabled=False):
            # In fp32 whatever the rest runs in: a value is a number on a scale, not one of many logits.
            bias = None if head.bias is None else head.bias.float()
            # A copy: FSDP2 hooks what a module returns, and warns of views, which may lose the hook.
            return nn.functional.linear(hidden.float(), head.weight.float(), bias).squeeze(-1).clone()


def load_value_module(
    model_dir: Path, *, dtype: torch.dtype, is_recomputing: bool, device: torch.device
) -> ValueModule:
    """Load a critic's directory and switch dropout off.

    Args:
        model_dir: Config and safetensors of a token classifier with one label.
        dtype: Type of the weights in memory.
        is_recomputing: Whether activations are recomputed in the backward pass.
        device: Where the weights go.

    Raises:
        EngineError: The directory's model has no single linear head.
    """
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    attention = row_attention.NAME if row_attention.supports_row_attention(config) else "sdpa"
    model = AutoModelForTokenClassification.from_pretrained(
        model_dir, config=config, dtype=dtype, local_files_only=True, use_safetensors=True,
        attn_implementation=attention,
    ).to(device)  # fmt: skip
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise EngineError(
            f"{type(model).__name__} of {model_dir} has no linear head `score` with one output, which a critic needs; "
            "use a model family whose token classifier has one (Llama, Mistral, Qwen2, Qwen3)"
        )
    disable_dropout(model)
    use_products_in(model.base_model)
    if is_recomputing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    module = ValueModule(model)
    # transformers recomputes activations in training mode only.
    module.train()
    return module
