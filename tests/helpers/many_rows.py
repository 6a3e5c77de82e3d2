"""Iterations of ten thousand rows, written in seconds: one table of made-up completions, used again and again."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from storage.layout import Split
from storage.rollout_schema import COLUMNS, Family, RowIdentity, arrow_schema
from storage.rollouts import write_family, write_rollouts
from storage.store import Store
from tests.helpers.storage_builders import RUN, rollout_row

SAMPLES = 8
_FILLED_IN = {"row_id", "group_id", "run", "iteration", "split", "shard"}


def completions(num_rows: int, num_tokens: int = 48) -> pa.Table:
    """Rows without what `write_rollouts` fills in; every text and every log-prob is another one."""
    rng = np.random.default_rng(7)
    names = [column.name for column in COLUMNS[Family.ROLLOUTS] if column.name not in _FILLED_IN]
    rows = []
    for index in range(num_rows):
        prompt, sample = divmod(index, SAMPLES)
        ids = rng.integers(0, 30_000, num_tokens).tolist()
        rows.append(
            rollout_row(
                prompt, sample, completion_token_ids=ids, sampler_logprobs=(-rng.exponential(size=num_tokens)).tolist(),
                completion_text=" ".join(f"word{number}" for number in ids), region=f"region-{prompt % 4}",
                prompt_text=f"Question {prompt}: " + "how much is it? " * 8,
            )
        )  # fmt: skip
    schema = pa.schema([arrow_schema(Family.ROLLOUTS).field(name) for name in names])
    return pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows], schema=schema)


def write_many(store: Store, iteration: int, rows: pa.Table, num_shards: int = 4) -> None:
    """Commit the rows as those of an iteration, with rewards and training columns."""
    facts = {"input_fingerprint": "f", "created_by": "test"}
    version = pa.array(np.full(rows.num_rows, iteration), pa.int64())
    for name in ("policy_version_first", "policy_version_last"):
        rows = rows.set_column(rows.column_names.index(name), rows.schema.field(name), version)
    size = -(-rows.num_rows // num_shards)
    ids: list[str] = []
    for shard in range(num_shards):
        part = rows.slice(shard * size, size)
        write_rollouts(store, RUN, iteration, shard, num_shards, part, **facts)
        ids += _row_ids(part, iteration)
    rng = np.random.default_rng(iteration)
    rewards = [
        {"row_id": name, "reward": float(value), "reward_status": "ok", "verifier": "exact/1"}
        for name, value in zip(ids, rng.random(len(ids)), strict=True)
    ]
    write_family(store, RUN, iteration, "reward", 0, 1, rewards, **facts)
    training = [
        {"row_id": name, "advantage": float(value), "is_dropped": False, "staleness": 0}
        for name, value in zip(ids, rng.normal(size=len(ids)), strict=True)
    ]
    write_family(store, RUN, iteration, "training", 0, 1, training, **facts)


def _row_ids(rows: pa.Table, iteration: int) -> list[str]:

    identity = RowIdentity(RUN, iteration, Split.TRAIN)
    pairs = zip(rows.column("prompt_id").to_pylist(), rows.column("sample_index").to_pylist(), strict=True)
    return [identity.row_id(prompt, sample) for prompt, sample in pairs]
