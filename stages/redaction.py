"""Hiding what may not be seen of prompts and completions, before rollouts are shown on a page or exported.

The function is the deployment's (`redaction.call` of `stages.settings`): it gets a text and the name of its column and
returns what may be seen of it. Where it changes a text, the token ids that spell the text are withheld too, and so are
those whose text was not kept, since nothing says what they spell. What a run stores and trains on stays as it is.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from stages.errors import ContractError
from stages.settings import read_settings

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS: Final = ("prompt_text", "completion_text", "gold_answer", "parsed_answer", "reward_error")
"""Columns that the function sees."""

TOKENS: Final[Mapping[str, str]] = {"prompt_text": "prompt_token_ids", "completion_text": "completion_token_ids"}
"""Column with the token ids of a text, by its column."""


class Redactor:
    """The deployment's function, with what follows from it."""

    def __init__(self, call: str, function: Callable[[str, str], str]) -> None:
        """Keep the function and its path, which messages name."""
        self._call = call
        self._function = function

    def text(self, text: str | None, column: str) -> str | None:
        """Return what may be seen of a text.

        Raises:
            ContractError: the function failed, or returned no text; nothing is shown then.
        """
        if text is None:
            return None
        try:
            seen = self._function(text, column)
        except Exception as error:  # noqa: BLE001 - whatever a foreign function raises
            # Its message may hold the text.
            raise self._refusal(f"failed on a {column} with {type(error).__name__}") from None
        if not isinstance(seen, str):
            raise self._refusal(f"returned {type(seen).__name__} for a {column}")
        return seen

    def row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what may be seen of a row; withheld token ids are None."""
        seen = dict(row)
        for column in TEXTS:
            if column in row:
                seen[column] = self.text(row[column], column)
        for column, tokens in TOKENS.items():
            if tokens in row and (row.get(column) is None or seen[column] != row[column]):
                seen[tokens] = None
        return seen

    def table(self, table: pa.Table) -> pa.Table:
        """Return what may be seen of a table; withheld token ids are null, whatever the schema says of nulls."""
        import pyarrow as pa
        import pyarrow.compute as pc

        seen = {name: table.column(name) for name in TEXTS if name in table.column_names}
        for column, texts in seen.items():
            cleaned = [self.text(text, column) for text in texts.to_pylist()]
            table = _with_column(table, column, pa.array(cleaned, pa.string()))
        for column, tokens in TOKENS.items():
            if tokens not in table.column_names:
                continue
            is_shown = pa.array([False] * table.num_rows)
            if column in seen:
                is_shown = pc.fill_null(pc.equal(seen[column], table.column(column)), fill_value=False)
            kept = pc.if_else(is_shown, table.column(tokens), pa.scalar(None, table.schema.field(tokens).type))
            table = _with_column(table, tokens, kept)
        return table

    def _refusal(self, what: str) -> ContractError:
        return ContractError(
            f"redaction {self._call} of the deployment {what}; nothing is shown until it returns a text for every "
            "text: correct it, or redaction.call in the settings."
        )


def deployed_redactor(environment: Mapping[str, str] = os.environ) -> Redactor | None:
    """Return the redactor of the deployment to which a process belongs, None where everything may be seen.

    Raises:
        ContractError: the settings or the function can't be used.
    """
    wanted = read_settings(environment).redaction
    if wanted is None:
        return None
    module, _, name = wanted.call.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ContractError(
            f"redaction.call of the settings names {wanted.call}, which can't be imported ({error}); install its "
            "package in this environment, or correct the name. Nothing is shown until then."
        ) from error
    if not callable(function):
        raise ContractError(f"redaction.call of the settings names {wanted.call}, which is no function.")
    return Redactor(wanted.call, function)


def _with_column(table: pa.Table, name: str, values: Any) -> pa.Table:  # noqa: ANN401 - array or chunked array
    field = table.schema.field(name).with_nullable(True)
    return table.set_column(table.schema.get_field_index(name), field, values)
