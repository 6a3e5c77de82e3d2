"""Runs of very many rows for benchmarks of the pages: ten thousand completions are made up and used repeatedly."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stages.home import MotleyHome
from storage.layout import Split
from storage.policies import head_version, publish_policy
from storage.rollout_schema import COLUMNS, Family, RowIdentity, arrow_schema
from storage.rollouts import has_rollouts, write_family, write_rollouts
from storage.runs import write_iteration
from storage.store import Store, open_store
from tests.helpers.page_runs import record_of, write_run
from tests.helpers.storage_builders import RUN, policy_files, rollout_row

SAMPLES: Final = 8
"""Completions of a prompt."""

_MADE_UP: Final = 10_000
_FILLED_IN: Final = frozenset({"row_id", "group_id", "run", "iteration", "split", "shard"})
_FACTS: Final[dict[str, Any]] = {"input_fingerprint": "f", "created_by": "benchmark"}


def write_home(home: Path, *, iterations: int, rows: int, num_tokens: int) -> None:
    """Write a deployment with a run of so many iterations of so many rows of so many tokens; what is there is kept."""
    place = MotleyHome(home)
    store = open_store(str(place.store_dir), is_synced=False)
    if not place.run_entry_file(RUN).is_file():
        write_run(place, iterations=iterations, done=0)
    if head_version(store, RUN) == iterations:
        return
    table = _copies(_completions(min(rows, _MADE_UP), num_tokens), rows)
    for iteration in range(iterations):
        if not has_rollouts(store, RUN, iteration, Family.TRAINING):
            _write_rows(store, iteration, table)
            write_iteration(store, record_of(iteration))
    publish_policy(store, RUN, iterations, policy_files(9), created_by="benchmark")


def _completions(num_rows: int, num_tokens: int) -> pa.Table:
    """Return rows without what `write_rollouts` fills in; every text and every log-prob is another one."""
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


def _copies(base: pa.Table, num_rows: int) -> pa.Table:
    """Return so many rows: those of the table again and again, under other prompts."""
    copies = []
    for start in range(0, num_rows, base.num_rows):
        part = base.slice(0, num_rows - start)
        numbers = [(start + k) // SAMPLES for k in range(part.num_rows)]
        part = _with(part, "prompt_id", pa.array([f"arithmetic/{number}" for number in numbers]))
        copies.append(_with(part, "prompt_index", pa.array(numbers, pa.int64())))
    return pa.concat_tables(copies).combine_chunks()


def _write_rows(store: Store, iteration: int, rows: pa.Table) -> None:
    """Commit the rows as those of an iteration, with rewards and training columns."""
    for name in ("policy_version_first", "policy_version_last"):
        rows = _with(rows, name, pa.array(np.full(rows.num_rows, iteration), pa.int64()))
    num_shards = max(4, rows.num_rows // 50_000)
    size = -(-rows.num_rows // num_shards)
    for shard in range(num_shards):
        write_rollouts(store, RUN, iteration, shard, num_shards, rows.slice(shard * size, size), **_FACTS)
    identity, rng = RowIdentity(RUN, iteration, Split.TRAIN), np.random.default_rng(iteration)
    pairs = zip(rows.column("prompt_id").to_pylist(), rows.column("sample_index").to_pylist(), strict=True)
    ids = pa.array([identity.row_id(prompt, sample) for prompt, sample in pairs])

    def every(value: Any) -> pa.Array:  # noqa: ANN401 - a column's value
        return pa.repeat(pa.scalar(value), rows.num_rows)

    rewards = {
        "row_id": ids, "reward": rng.random(rows.num_rows), "reward_status": every("ok"), "verifier": every("exact/1"),
    }  # fmt: skip
    write_family(store, RUN, iteration, Family.REWARD, 0, 1, pa.table(rewards), **_FACTS)
    training = {
        "row_id": ids, "advantage": rng.normal(size=rows.num_rows), "is_dropped": every(value=False),
        "staleness": every(0),
    }  # fmt: skip
    write_family(store, RUN, iteration, Family.TRAINING, 0, 1, pa.table(training), **_FACTS)


def _with(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), table.schema.field(name), values)
