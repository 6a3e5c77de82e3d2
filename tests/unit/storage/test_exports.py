"""Exports are read back by the tools that they are for; Hugging Face datasets itself in tests/integration/storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from storage.errors import ObjectMissingError
from storage.exports import ExportFormat, export_rollouts
from storage.layout import Split
from storage.rollout_schema import prompt_id, row_id
from storage.rollouts import read_rollouts, write_family, write_rollouts
from storage.store import Store, open_store
from tests.helpers.storage_builders import RUN, new_run, rollout_rows, write_iteration_data

PROMPTS, SAMPLES = 4, 2


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two iterations, of which the first one alone is trained on."""
    made = open_store(str(tmp_path / "store"))
    new_run(made)
    for iteration in range(2):
        write_iteration_data(made, iteration, num_prompts=PROMPTS)
    training = [
        {
            "row_id": row_id(RUN, 0, prompt_id("arithmetic", prompt), sample), "advantage": sample - 0.5,
            "is_dropped": False, "staleness": 0,
        }
        for prompt in range(PROMPTS) for sample in range(SAMPLES)
    ]  # fmt: skip
    write_family(made, RUN, 0, "training", 0, 1, training, input_fingerprint="f", created_by="test")
    return made


def expected(store: Store, iteration: int) -> list[dict[str, Any]]:
    families = ("reward", "training") if iteration == 0 else ("reward",)
    return read_rollouts(store, RUN, iteration, families=families).to_pylist()


def test_json_lines_hold_every_column_and_duckdb_reads_them(store: Store, tmp_path: Path) -> None:
    done = export_rollouts(store, RUN, open_store(str(tmp_path / "out")), form=ExportFormat.JSONL)
    assert [(file.key, file.rows) for file in done] == [
        (f"{RUN}/train/iteration-{k:06d}.jsonl", PROMPTS * SAMPLES) for k in range(2)
    ]
    for iteration, file in enumerate(done):
        lines = [json.loads(line) for line in (tmp_path / "out" / file.key).read_text().splitlines()]
        for line, row in zip(lines, expected(store, iteration), strict=True):
            assert set(line) == set(row)
            assert line["completion_token_ids"] == row["completion_token_ids"]
            assert line["reward_parts"] == (None if row["reward_parts"] is None else dict(row["reward_parts"]))
            assert line["started_at"] == row["started_at"].isoformat()
    counts = duckdb.sql(
        f"SELECT iteration, count(*), count(advantage) FROM read_json('{tmp_path}/out/{RUN}/train/*.jsonl') "
        "GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert counts == [(0, 8, 8), (1, 8, 0)]


def test_files_for_hugging_face_have_one_schema_without_maps_and_a_card_that_names_their_splits(
    store: Store, tmp_path: Path
) -> None:
    target = open_store(str(tmp_path / "out"))
    done = export_rollouts(store, RUN, target, form=ExportFormat.HF)
    tables = [pq.read_table(tmp_path / "out" / file.key) for file in done]
    assert tables[0].schema == tables[1].schema
    assert not any(pa.types.is_map(field.type) or pa.types.is_null(field.type) for field in tables[0].schema)
    assert tables[0].column("advantage").to_pylist() == [row["advantage"] for row in expected(store, 0)]
    assert tables[1].column("advantage").null_count == 8
    parts = [row["reward_parts"] for row in expected(store, 0)]
    assert tables[0].column("reward_parts").to_pylist() == [
        None if part is None else [{"key": key, "value": value} for key, value in part] for part in parts
    ]

    head = (tmp_path / "out" / RUN / "README.md").read_text().split("---\n")[1]
    assert yaml.safe_load(head)["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train/*.parquet"}]}
    ]
    rows = rollout_rows(range(1), iteration=2)
    write_rollouts(store, RUN, 2, 0, 1, rows, split=Split.EVAL, input_fingerprint="f", created_by="test")
    export_rollouts(store, RUN, target, split=Split.EVAL, form=ExportFormat.HF)
    card = (tmp_path / "out" / RUN / "README.md").read_text()
    assert [item["split"] for item in yaml.safe_load(card.split("---\n")[1])["configs"][0]["data_files"]] == [
        "train", "eval"
    ]  # fmt: skip


@pytest.mark.parametrize("form", ExportFormat)
def test_an_export_writes_what_redaction_leaves(store: Store, tmp_path: Path, form: ExportFormat) -> None:
    def hide(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index("prompt_text")
        return table.set_column(index, "prompt_text", pa.array(["hidden"] * table.num_rows))

    texts = {row["prompt_text"] for row in expected(store, 0)}
    export_rollouts(store, RUN, open_store(str(tmp_path / "out")), form=form, redact=hide)
    files = [file for file in (tmp_path / "out").rglob("iteration*") if file.is_file()]
    files = files or list((tmp_path / "out").rglob("*.parquet"))
    for file in files:
        rows = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.suffix == ".jsonl"
            else pq.ParquetFile(file).read().to_pylist()
        )  # fmt: skip
        assert {row["prompt_text"] for row in rows} == {"hidden"}
        assert len(rows) == PROMPTS * SAMPLES
    assert texts != {"hidden"}
    assert len(files) == 2


@pytest.mark.parametrize("form", ExportFormat)
def test_nothing_to_export_is_said(store: Store, tmp_path: Path, form: ExportFormat) -> None:
    with pytest.raises(ObjectMissingError, match="no committed rollouts of split eval to export"):
        export_rollouts(store, RUN, open_store(str(tmp_path / "out")), split=Split.EVAL, form=form)
    assert not (tmp_path / "out" / RUN).exists()
