from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stages.errors import ContractError
from stages.redaction import Redactor, deployed_redactor

SECRET = "key-123"


def hide(text: str, column: str) -> str:
    """Redact a secret; a function that settings name."""
    return text.replace(SECRET, f"[{column}]")


def explode(text: str, column: str) -> str:
    raise ValueError(text)


def forget(text: str, column: str) -> None:
    return None


def row(**changes: Any) -> dict[str, Any]:
    plain = {
        "prompt_text": "2 + 3 =", "completion_text": "5", "gold_answer": "5", "parsed_answer": None,
        "prompt_token_ids": [1, 2], "completion_token_ids": [3], "reward": 1.0,
    }  # fmt: skip
    return {**plain, **changes}


ROWS = [
    row(),
    row(prompt_text=f"use {SECRET} =", gold_answer=SECRET),
    row(completion_text=f"it is {SECRET}", parsed_answer=SECRET),
    row(prompt_text=None),
]
SEEN = [
    row(),
    row(prompt_text="use [prompt_text] =", gold_answer="[gold_answer]", prompt_token_ids=None),
    row(completion_text="it is [completion_text]", parsed_answer="[parsed_answer]", completion_token_ids=None),
    row(prompt_text=None, prompt_token_ids=None),
]


def test_rows_lose_secrets_in_texts_and_the_token_ids_that_spell_them() -> None:
    redactor = Redactor("here.hide", hide)
    assert [redactor.row(item) for item in ROWS] == SEEN
    assert redactor.row({"row_id": "r"}) == {"row_id": "r"}


def test_tables_are_redacted_as_rows_are_even_where_nulls_were_forbidden() -> None:
    tokens = pa.field("completion_token_ids", pa.list_(pa.int32()), nullable=False)
    table = pa.Table.from_pylist(ROWS)
    index = table.schema.get_field_index("completion_token_ids")
    table = table.set_column(index, tokens, table.column(index).cast(tokens.type))
    assert Redactor("here.hide", hide).table(table).to_pylist() == SEEN
    only_tokens = table.select(["completion_token_ids"])
    assert Redactor("here.hide", hide).table(only_tokens).column(0).null_count == len(ROWS)


@pytest.mark.parametrize(
    ("function", "words"),
    [(explode, "failed on a prompt_text with ValueError"), (forget, "returned NoneType for a prompt_text")],
)
def test_a_function_that_fails_shows_nothing_not_even_in_the_message(function: Any, words: str) -> None:
    with pytest.raises(ContractError, match=words) as refused:
        Redactor("here.it", function).row(ROWS[1])
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None


def test_the_deployment_names_the_function(tmp_path: Path) -> None:
    home = {"MOTLEY_HOME": str(tmp_path)}
    assert deployed_redactor(home) is None
    (tmp_path / "settings.yaml").write_text(f"redaction: {{call: {__name__}.hide}}")
    found = deployed_redactor(home)
    assert found is not None
    assert found.text(SECRET, "gold_answer") == "[gold_answer]"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("not_installed.clean", "can't be imported"),
        ("stages.redaction.missing", "can't be imported"),
        ("stages.redaction.TEXTS", "is no function"),
    ],
)
def test_a_function_that_is_not_there_is_refused(tmp_path: Path, call: str, words: str) -> None:
    (tmp_path / "settings.yaml").write_text(f"redaction: {{call: {call}}}")
    with pytest.raises(ContractError, match=words):
        deployed_redactor({"MOTLEY_HOME": str(tmp_path)})
