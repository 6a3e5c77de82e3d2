"""Files of schema version 1 stay readable: two files written once (pyarrow 26.0.1) and never regenerated.

A newer schema adds its own pair of files beside these.
"""

from __future__ import annotations

from pathlib import Path

from storage.layout import shard_folder
from storage.manifest import PartSource, commit
from storage.rollout_schema import COLUMNS
from storage.rollouts import read_rollouts
from storage.runs import RunRecord
from storage.store import open_store
from tests.helpers.storage_builders import NOW, RUN


def test_files_of_schema_version_1_are_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for family in ("rollouts", "reward"):
        commit(
            store,
            shard_folder(RUN, 0, family, 0),
            {"rows.parquet": PartSource(Path(__file__).with_name(f"{family}_v1.parquet"), 4)},
            kind=family,
            input_fingerprint="f",
            created_by="test",
            metadata={"shard": 0, "num_shards": 1},
        )
    columns = ["prompt_id", "sample_index", "completion_token_ids", "seed", "started_at", "reward", "reward_parts"]
    found = read_rollouts(store, RUN, 0, families=["reward"], columns=columns).to_pylist()
    assert [list(row.values()) for row in found] == [
        ["arithmetic/0", 0, [20, 21], 6714634466166049356, NOW, 0.0, [("answer", 0.0)]],
        ["arithmetic/0", 1, [20, 22], 2601759181797271721, NOW, 1.0, [("answer", 1.0)]],
        ["arithmetic/1", 0, [21, 21], 4573673036908090279, NOW, 0.0, [("answer", 0.0)]],
        ["arithmetic/1", 1, [21, 22], 1444829131378765314, NOW, 1.0, [("answer", 1.0)]],
    ]


def test_i3_fields_that_users_missed_elsewhere_are_there() -> None:
    """I3: tokens, advantage, reward, step, sample and prompt index, finish reason, truth; the code's commit by run."""
    names = {column.name for columns in COLUMNS.values() for column in columns}
    assert names >= {
        "prompt_token_ids", "completion_token_ids", "sampler_logprobs", "advantage", "reward", "reward_parts",
        "iteration", "prompt_index", "sample_index", "finish_reason", "gold_answer",
    }  # fmt: skip
    assert {"git_commit", "package_versions"} <= RunRecord.model_fields.keys()


def test_documentation_lists_every_column_with_its_meaning() -> None:
    text = (Path(__file__).parents[3] / "docs" / "storage_layout.md").read_text()
    missing = [
        column.name
        for columns in COLUMNS.values()
        for column in columns
        if f"| `{column.name}` | {column.type} | {'no' if column.is_required else 'yes'} | {column.meaning}" not in text
    ]
    assert missing == []
