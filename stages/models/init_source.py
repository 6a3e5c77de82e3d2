"""Source `init`: a model of the job's shape with random weights and a character tokenizer, warmed up if wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.errors import DataError
from stages.models.character_tokenizer import save_character_tokenizer
from stages.models.random_model import make_random_model
from stages.models.request import MaterialiseRequest, WarmUpRows
from stages.models.warm_up import WarmUpRow, warm_up
from stages.spec.source import InitSource


def write_init_model(source: InitSource, request: MaterialiseRequest, directory: Path) -> dict[str, Any]:
    """Write config, weights and tokenizer.

    Returns:
        Facts: `warm_up_steps` and `warm_up_score`, or nothing without a warm-up.

    Raises:
        SpecFaultsError: The shape doesn't fit the tokenizer, or the warm-up didn't reach its target.
        DataError: A warm-up without rows, or rows with characters outside the alphabet.
    """
    tokenizer = save_character_tokenizer(source.alphabet, directory)
    model = make_random_model(source.architecture, request.shape, len(tokenizer), request.seed)
    facts: dict[str, Any] = {}
    if source.warm_up is not None:
        rows = _warm_up_rows(request.warm_up_rows, tokenizer)
        end = warm_up(model, source.warm_up, rows.train, rows.held_out, seed=request.seed, report=request.report)
        facts = {"warm_up_steps": end.step, "warm_up_score": end.score}
    model.save_pretrained(directory)
    return facts


def _warm_up_rows(make_rows: Callable[[Any], WarmUpRows] | None, tokenizer: Any) -> WarmUpRows:  # noqa: ANN401
    if make_rows is None:
        raise DataError("source.warm_up needs the rows of the job's dataset; give them, or set source.warm_up to null")
    rows = make_rows(tokenizer)
    if not rows.train:
        raise DataError(
            "source.warm_up needs rows with an answer, but the dataset has none; set source.warm_up to null"
        )
    _refuse_unknown_characters(rows.train, tokenizer)
    return rows


def _refuse_unknown_characters(rows: Sequence[WarmUpRow], tokenizer: Any) -> None:  # noqa: ANN401 - untyped
    unknown = tokenizer.unk_token_id
    bad = [row for row in rows if unknown in row.prompt_token_ids or unknown in row.answer_token_ids]
    if bad:
        examples = ", ".join(repr(tokenizer.decode([*row.prompt_token_ids, *row.answer_token_ids])) for row in bad[:3])
        raise DataError(
            f"{len(bad)} of {len(rows)} rows have characters outside source.alphabet, e.g. {examples}; add them to it",
            num_rows=len(bad),
        )
