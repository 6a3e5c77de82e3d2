"""Rollouts written and read through storage against the same table through PyArrow alone, alternating in one run.

`python -m benchmarks.storage.rollout_io --rows 50000 --repeats 5`. Both sides use zstd. The ratio is raw seconds over
Motley's seconds, of CPU time (all threads) and of wall time: 0.8 and more is the goal.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.storage.record import write_result
from storage.rollout_schema import COLUMNS, Family, arrow_schema, sample_seed
from storage.rollouts import read_rollouts, write_rollouts
from storage.store import open_store

RUN = "bench"
SAMPLES = 8


def rollout_table(rows: int, first_prompt: int = 0, iteration: int = 0) -> pa.Table:
    """Return rows as generation makes them: about 1 KB of text, 60 + 200 tokens, log-probs."""
    random = np.random.default_rng(first_prompt)
    words = np.array([f"word{i}" for i in range(4000)])
    texts = [" ".join(words[random.integers(0, 4000, 130)]) for _ in range(rows)]
    prompts = first_prompt + np.arange(rows) // SAMPLES
    names = [f"arithmetic/{number}" for number in prompts]
    samples = np.arange(rows) % SAMPLES
    time_of = datetime(2026, 1, 2, tzinfo=UTC)

    def lists(values: np.ndarray, size: int, kind: pa.DataType) -> pa.Array:
        offsets = pa.array(np.arange(0, (rows + 1) * size, size), pa.int32())
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind))

    logprobs = -random.exponential(0.4, rows * 200).astype(np.float32)
    same = {
        "finish_reason": "stop", "weights_hash": "0" * 64, "temperature": 1.0, "top_p": 1.0, "engine": "vllm",
        "engine_version": "0.32", "dtype": "float32", "logprob_mode": "processed", "template_hash": "1" * 64,
        "tokenizer_hash": "2" * 64, "region": "here", "machine": "m-0", "gpu_type": "cpu", "started_at": time_of,
        "ended_at": time_of, "policy_version_first": iteration, "policy_version_last": iteration,
    }  # fmt: skip
    schema = arrow_schema(Family.ROLLOUTS)
    columns = {name: pa.repeat(pa.scalar(value, schema.field(name).type), rows) for name, value in same.items()}
    columns |= {
        "prompt_id": pa.array(names), "prompt_index": pa.array(prompts), "sample_index": pa.array(samples, pa.int32()),
        "prompt_text": pa.array([text[:200] for text in texts]), "completion_text": pa.array(texts),
        "gold_answer": pa.array([str(number) for number in prompts]),
        "prompt_token_ids": lists(random.integers(0, 49152, rows * 60), 60, pa.int32()),
        "completion_token_ids": lists(random.integers(0, 49152, rows * 200), 200, pa.int32()),
        "sampler_logprobs": lists(logprobs, 200, pa.float32()),
        "seed": pa.array([sample_seed(0, iteration, n, int(s)) for n, s in zip(names, samples, strict=True)]),
        "top_k": pa.nulls(rows, pa.int64()),
    }  # fmt: skip
    return pa.table(columns)


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    table = rollout_table(given.rows)
    with tempfile.TemporaryDirectory() as name:
        data = measure(table, Path(name), given.repeats)
    write_result("rollout_io", {"rows": given.rows, "repeats": given.repeats, "bytes_in_memory": table.nbytes}, data)


def measure(table: pa.Table, folder: Path, repeats: int) -> dict[str, object]:
    """Return seconds of both sides and their ratios."""
    seconds: dict[str, list[tuple[float, float]]] = {}
    sizes: dict[str, int] = {}
    for _ in range(repeats):
        store, raw = open_store(str(folder / "store"), is_synced=False), folder / "raw.parquet"
        whole = _complete(table)
        write = partial(write_rollouts, store, RUN, 0, 0, 1, table, input_fingerprint="f", created_by="bench")
        _timed(seconds, "raw_write", partial(pq.write_table, whole, raw, compression="zstd"))
        _timed(seconds, "write", write)
        sizes = {"raw": raw.stat().st_size, "motley": _bytes_below(folder / "store")}
        _timed(seconds, "raw_read", partial(pq.read_table, raw))
        _timed(seconds, "read", partial(read_rollouts, store, RUN, 0))
        shutil.rmtree(folder / "store")
    result: dict[str, object] = {"bytes": sizes}
    for what in ("write", "read"):
        for place, kind in enumerate(("cpu", "wall")):
            ours, theirs = (median(pair[place] for pair in seconds[f"{prefix}{what}"]) for prefix in ("", "raw_"))
            result[f"{what}_{kind}"] = {"raw_s": theirs, "motley_s": ours, "ratio": theirs / ours}
    return result


def _complete(table: pa.Table) -> pa.Table:
    """Return the table with the columns that storage fills in, so that both sides write the same ones."""
    if table.num_columns == len(COLUMNS[Family.ROLLOUTS]):
        return table
    rows = table.num_rows
    fixed = {"run": RUN, "split": "train", "row_id": "0" * 32, "group_id": "0" * 32}
    for name, value in fixed.items():
        table = table.append_column(name, pa.repeat(pa.scalar(value), rows))
    table = table.append_column("iteration", pa.repeat(pa.scalar(0, pa.int64()), rows))
    return table.append_column("shard", pa.repeat(pa.scalar(0, pa.int32()), rows))


def _timed(seconds: dict[str, list[tuple[float, float]]], name: str, action: Callable[[], object]) -> None:
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    seconds.setdefault(name, []).append((time.process_time() - cpu, time.perf_counter() - wall))


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
