"""Rows of a supervised warm-up from a job's dataset: the prompts that RL will see, with their gold answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stages.data.dataset import load_dataset
from stages.data.rows import PromptRow
from stages.data.spec import DataSpec, TemplateSpec
from stages.data.template import PromptEncoder
from stages.models.request import WarmUpRows
from stages.models.warm_up import WarmUpRow


def dataset_warm_up_rows(data: DataSpec, template: TemplateSpec, tokenizer: Any) -> WarmUpRows:  # noqa: ANN401 - untyped
    """Encode prompts as RL does, and answers as plain text with the end token; rows without an answer are left out.

    Raises:
        DataError: The dataset can't be read.
    """
    dataset = load_dataset(data)
    encoder = PromptEncoder(template, tokenizer)
    return WarmUpRows(
        train=_encoded(dataset.train.rows, encoder, tokenizer),
        held_out=_encoded(dataset.held_out.rows, encoder, tokenizer),
    )


def _encoded(rows: Iterable[PromptRow], encoder: PromptEncoder, tokenizer: Any) -> list[WarmUpRow]:  # noqa: ANN401
    return [
        WarmUpRow(
            prompt_token_ids=encoder.encode(row).token_ids,
            answer_token_ids=[*tokenizer.encode(row.answer, add_special_tokens=False), tokenizer.eos_token_id],
        )
        for row in rows
        if row.answer is not None
    ]
