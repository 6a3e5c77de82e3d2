"""Many rollout rows: seconds and peak memory of what people ask, each in a process of its own.

`python -m benchmarks.storage.million_rows --rows 1000000 --folder DIR`; rows that are in DIR already are used again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.storage.record import write_result
from benchmarks.storage.rollout_io import RUN, SAMPLES, rollout_table
from storage.rollout_schema import Family, RowIdentity, Split
from storage.rollouts import has_rollouts, write_family, write_rollouts
from storage.runs import RunRecord, create_run
from storage.sql import connect
from storage.store import Store, open_store

PER_ITERATION = 50_000
QUERIES = {
    "by_problem": """SELECT prompt_id, avg(reward) AS reward, count(*) FROM completions
                     WHERE prompt_id = 'arithmetic/77' GROUP BY 1""",
    "worst_problems": """SELECT prompt_id, avg(reward) AS reward FROM completions GROUP BY 1 ORDER BY 2 LIMIT 10""",
}


def main() -> None:
    """Write what is missing, then measure each question in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ask", choices=["stats", *QUERIES])
    given = parser.parse_args()
    store = open_store(str(given.folder), is_synced=False)
    if given.ask:
        _ask(store, given.ask)
        return
    began = time.process_time()
    _write(store, given.rows)
    data: dict[str, Any] = {"write_cpu_s": time.process_time() - began}
    for question in ("stats", *QUERIES):
        command = [sys.executable, "-m", "benchmarks.storage.million_rows", "--folder", str(given.folder)]
        done = subprocess.run([*command, "--ask", question], capture_output=True, text=True, check=True)
        wall, cpu, peak, rows = done.stdout.split()[-4:]
        data[question] = {"wall_s": float(wall), "cpu_s": float(cpu), "peak_mb": float(peak), "answer_rows": int(rows)}
    data["parquet_bytes"] = sum(path.stat().st_size for path in given.folder.rglob("*.parquet"))
    write_result("million_rows", {"rows": given.rows, "per_iteration": PER_ITERATION}, data)


def _ask(store: Store, question: str) -> None:
    from cli.rollouts import STATS_QUERY

    cpu, wall = time.process_time(), time.perf_counter()
    with connect(store, RUN) as connection:
        query, values = (STATS_QUERY, ["train"]) if question == "stats" else (QUERIES[question], [])
        rows = connection.execute(query, values).fetchall()
    print(time.perf_counter() - wall, time.process_time() - cpu, _peak_mb(), len(rows))


def _peak_mb() -> float:
    """Return the most memory that this process has held; `getrusage` counts that of the parent before `exec` too."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


def _write(store: Store, rows: int) -> None:
    if not store.exists(f"{RUN}/run.json"):
        at = datetime(2026, 1, 2, tzinfo=UTC)
        create_run(
            store, RunRecord(run=RUN, job={}, cluster={}, num_iterations=rows // PER_ITERATION, seeds={}, created_at=at)
        )
    count = min(rows, PER_ITERATION)
    table = rollout_table(count)
    random = np.random.default_rng(0)
    for iteration in range(rows // count):
        if has_rollouts(store, RUN, iteration, Family.REWARD):
            continue
        write_rollouts(store, RUN, iteration, 0, 1, table, input_fingerprint="f", created_by="bench")
        identity = RowIdentity(RUN, iteration, Split.TRAIN)
        names = table.column("prompt_id").to_pylist()
        rewards = pa.table(
            {
                "row_id": [identity.row_id(name, place % SAMPLES) for place, name in enumerate(names)],
                "reward": random.integers(0, 2, count).astype(float),
                "reward_status": pa.repeat(pa.scalar("ok"), count),
                "verifier": pa.repeat(pa.scalar("exact/1"), count),
            }
        )
        write_family(store, RUN, iteration, Family.REWARD, 0, 1, rewards, input_fingerprint="f", created_by="bench")


if __name__ == "__main__":
    main()
