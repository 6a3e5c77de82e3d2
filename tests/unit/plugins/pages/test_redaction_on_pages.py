"""What a deployment's redaction hides is on no page, in no download, and can't be searched for."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from tests.helpers.page_runs import DAG_ID, client_of, free_access, sentence

URL = f"/dags/{DAG_ID}/rollouts"
GROUP = f"/dags/{DAG_ID}/group?iteration=1&prompt=arithmetic/1"


def with_redaction(monkeypatch: pytest.MonkeyPatch, folder: Path, call: str) -> None:
    file = folder / "settings.yaml"
    file.write_text(f"redaction: {{call: {call}}}")
    monkeypatch.setenv("MOTLEY_SETTINGS", str(file))


def test_texts_are_hidden_in_the_list_the_group_and_the_download(
    page_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(page_home, free_access())
    assert "the answer is" in client.get(f"{URL}?iteration=1").text
    assert 'title="token 2,' in client.get(GROUP).text

    with_redaction(monkeypatch, tmp_path, "tests.helpers.redactions.hide_answer")
    listed = client.get(f"{URL}?iteration=1").text
    assert "the [hidden in completion_text] is" in listed
    assert "the answer" not in listed
    group = client.get(GROUP).text
    assert "the [hidden in completion_text] is" in group
    assert 'title="token 2,' not in group
    both = client.get(f"{GROUP}&other=0").text
    assert "the answer" not in both
    table = pq.read_table(io.BytesIO(client.get(f"{URL}.parquet?iteration=1").content))
    assert not any("answer" in (text or "").replace("[hidden in", "") for text in table["completion_text"].to_pylist())
    assert table["completion_token_ids"].null_count == table.num_rows
    assert table["sampler_logprobs"].null_count == 0


def test_redacted_texts_can_not_be_searched(
    page_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: TestClient
) -> None:
    by_text, by_id = f"{URL}?iteration=1&prompt=7+%2B+1", f"{URL}?iteration=1&prompt=ARITHMETIC/1"
    assert "No completion of this iteration" not in client.get(by_text).text
    with_redaction(monkeypatch, tmp_path, "tests.helpers.redactions.hide_answer")
    assert "No completion of this iteration" in client.get(by_text).text
    assert "No completion of this iteration" not in client.get(by_id).text


def test_nothing_is_shown_when_the_redaction_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: TestClient
) -> None:
    with_redaction(monkeypatch, tmp_path, "not_installed.clean")
    for path in (f"{URL}?iteration=1", GROUP, f"{URL}.parquet?iteration=1"):
        status, said = sentence(client, path)
        assert (status, "not_installed.clean, which can't be imported" in said) == (500, True)
