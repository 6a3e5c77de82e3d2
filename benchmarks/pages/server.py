"""What a page costs the server: milliseconds to its first bytes and to its end, and processor time, cold and warm.

`python -m benchmarks.pages.server --folder DIR --rows 10000 --iterations 100 --largest 1000000`; what lies in DIR
already is used again. Each page is asked for in a process of its own, over HTTP on loopback: cold is the first request
of the process, with every import that the page needs; warm is the best of the next ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa

from benchmarks.storage.record import write_result
from stages.home import MotleyHome
from storage.policies import head_version, publish_policy
from storage.rollouts import has_rollouts
from storage.runs import write_iteration
from storage.store import Store, open_store
from tests.helpers.many_rows import SAMPLES, completions, write_many
from tests.helpers.page_runs import DAG_ID, free_access, record_of, write_run
from tests.helpers.page_server import page_server
from tests.helpers.storage_builders import RUN, policy_files

WARM = 3
"""Requests after the first one."""

PAGES = {
    "run": f"/dags/{DAG_ID}/run",
    "rollouts": f"/dags/{DAG_ID}/rollouts?iteration=0",
    "filtered": f"/dags/{DAG_ID}/rollouts?iteration=0&prompt=question+7&reward_max=0.5&region=region-1",
    "last page": f"/dags/{DAG_ID}/rollouts?iteration=0&order=best&page=",
    "group": f"/dags/{DAG_ID}/group?iteration=0",
    "plan": f"/dags/{DAG_ID}/plan",
    "cluster": "/cluster",
}
OF_ONE_ITERATION = ("rollouts", "filtered", "last page", "group")


def main() -> None:
    """Write what is missing, then ask for each page in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument(
        "--largest", type=int, default=1_000_000, help="Rows of a second run of one iteration; 0: none."
    )
    parser.add_argument("--home", type=Path, help="Ask for one page of this home.")
    parser.add_argument("--path")
    given = parser.parse_args()
    if given.home:
        print(json.dumps(asked(given.home, given.path)))
        return
    many, large = given.folder / "many", given.folder / "large"
    write(many, given.iterations, given.rows)
    data = {name: measured(many, path_of(name, given.rows)) for name in PAGES}
    if given.largest:
        write(large, 1, given.largest, tokens=8)
        data |= {f"{name}, large": measured(large, path_of(name, given.largest)) for name in OF_ONE_ITERATION}
    settings = {"iterations": given.iterations, "rows": given.rows, "largest": given.largest}
    write_result("server", settings, data, folder=Path(__file__).parent / "results")


def path_of(name: str, rows: int) -> str:
    """Return the address of a page; the last page of a list depends on its length."""
    return PAGES[name] + (str(rows // 50) if PAGES[name].endswith("page=") else "")


def measured(home: Path, path: str) -> dict[str, Any]:
    """Return what a page costs, measured in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.pages.server",
        "--folder",
        str(home),
        "--home",
        str(home),
        "--path",
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def asked(home: Path, path: str) -> dict[str, Any]:
    """Return what the first request and the best of the later ones cost, in milliseconds."""
    with page_server(home, free_access()) as url, httpx.Client(timeout=600.0) as client:
        cold, *warm = [request(client, url + path) for _ in range(1 + WARM)]
    best = {name: min(one[name] for one in warm) for name in warm[0]}
    return {"cold": cold, "warm": best}


def request(client: httpx.Client, url: str) -> dict[str, float]:
    """Return milliseconds to the first bytes and to the end, processor milliseconds, and kilobytes."""
    cpu, wall, first_ms, size = time.process_time(), time.perf_counter(), 0.0, 0
    with client.stream("GET", url) as answer:
        answer.raise_for_status()
        for chunk in answer.iter_raw():
            first_ms = first_ms or 1000 * (time.perf_counter() - wall)
            size += len(chunk)
    whole_ms, cpu_ms = 1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu)
    return {
        "first_ms": round(first_ms, 1),
        "whole_ms": round(whole_ms, 1),
        "cpu_ms": round(cpu_ms, 1),
        "kb": size // 1000,
    }


def write(home: Path, iterations: int, rows: int, tokens: int = 48) -> None:
    """Write a run with so many iterations of so many rows of so many tokens, unless it is there."""
    store = open_store(str(MotleyHome(home).store_dir), is_synced=False)
    if not store.exists(f"{RUN}/run.json"):
        write_run(MotleyHome(home), iterations=iterations, done=0)
    if head_version(store, RUN) == iterations:
        return
    table = _many(rows, tokens)
    for iteration in range(iterations):
        if not has_rollouts(store, RUN, iteration, "training"):
            _write_iteration(store, iteration, table)
    publish_policy(store, RUN, iterations, policy_files(9), created_by="benchmark")


def _many(rows: int, tokens: int) -> pa.Table:
    """Return rows of which ten thousand are made up; the others have other prompts and the same texts."""
    base = completions(min(rows, 10_000), tokens)
    copies = []
    for copy in range(-(-rows // base.num_rows)):
        part = base.slice(0, min(base.num_rows, rows - copy * base.num_rows))
        numbers = [copy * base.num_rows + k // SAMPLES for k in range(part.num_rows)]
        names = [f"arithmetic/{copy}-{k // SAMPLES}" for k in range(part.num_rows)]
        for name, values in (("prompt_id", pa.array(names)), ("prompt_index", pa.array(numbers, pa.int64()))):
            part = part.set_column(part.column_names.index(name), part.schema.field(name), values)
        copies.append(part)
    return pa.concat_tables(copies).combine_chunks()


def _write_iteration(store: Store, iteration: int, table: pa.Table) -> None:
    write_many(store, iteration, table, num_shards=max(4, table.num_rows // 50_000))
    write_iteration(store, record_of(iteration))


if __name__ == "__main__":
    main()
