"""Hugging Face datasets loads an export as it is, all splits, with lists where Motley has maps."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.exports import ExportFormat, export_rollouts
from storage.layout import Split
from storage.rollouts import read_rollouts, write_rollouts
from storage.store import open_store
from tests.helpers.storage_builders import RUN, new_run, rollout_rows, write_iteration_data

pytestmark = pytest.mark.engines


def test_load_dataset_reads_an_export(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    store, target = open_store(str(tmp_path / "store")), open_store(str(tmp_path / "out"))
    new_run(store)
    for iteration in range(2):
        write_iteration_data(store, iteration, num_prompts=4)
    rows = rollout_rows(range(1), iteration=2)
    write_rollouts(store, RUN, 2, 0, 1, rows, split=Split.EVAL, input_fingerprint="f", created_by="test")
    for split in Split:
        export_rollouts(store, RUN, target, split=split, form=ExportFormat.HF)

    found = datasets.load_dataset(str(tmp_path / "out" / RUN), cache_dir=str(tmp_path / "cache"))

    assert {name: part.num_rows for name, part in found.items()} == {"train": 16, "eval": 2}
    rows = read_rollouts(store, RUN, 1, families=("reward",)).to_pylist()
    loaded = [row for row in found["train"] if row["iteration"] == 1]
    for name in ("row_id", "prompt_text", "completion_token_ids", "reward", "reward_status"):
        assert [row[name] for row in loaded] == [row[name] for row in rows]
    assert [row["advantage"] for row in loaded] == [None] * 8
