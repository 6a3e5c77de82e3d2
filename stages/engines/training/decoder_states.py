"""Hidden states of a decoder at the positions before completion tokens; what policy and critic share.

Models with plain attention run on distinct tokens only (see `row_attention`), others on padded rows.

Legend of shapes: U distinct tokens, B rows, L padded length, N completion tokens of all rows, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def completion_states(
    decoder: Any,  # noqa: ANN401 - transformers has no useful type
    token_ids: Tensor,
    positions: Tensor,
    row_places: Tensor,
    token_owners: Tensor,
    hidden_index: Tensor,
    *,
    shares_prompts: bool,
) -> Tensor:
    """Return the final hidden states [N, H] after the decoder's last norm.

    Args:
        decoder: The model without its head.
        token_ids: [U].
        positions: [U], in the row.
        row_places: [B, L], places in `token_ids`; anything behind a row's end.
        token_owners: [U], a position of each token in the flattened [B * L].
        hidden_index: [N], positions in the flattened [B * L].
        shares_prompts: Whether the decoder has row attention.
    """
    if shares_prompts:
        hidden = decoder(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False,
            row_places=row_places, token_owners=token_owners,
        ).last_hidden_state[0]  # fmt: skip
        return hidden.index_select(0, row_places.flatten().index_select(0, hidden_index))
    hidden = decoder(input_ids=token_ids[row_places], use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, hidden_index)


def disable_dropout(model: nn.Module) -> None:
    """Switch every dropout of a model off: two passes of one function must agree."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "dropout", "attn_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
