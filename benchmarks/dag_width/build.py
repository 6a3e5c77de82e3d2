"""What the DAG of a run costs Airflow's DAG processor, by the number of machines: CPU seconds, size, edges.

`AIRFLOW_HOME=$(mktemp -d) .venv/bin/python -m benchmarks.dag_width.build --out benchmarks/dag_width/results/build.json`

Building is what every parse and every task start pays; serialising is paid by the DAG processor. Best of several
rounds, since other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from airflow.serialization.serialized_objects import DagSerialization

from benchmarks.planner.record import environment
from plugins.iteration_dag import build_run_dag
from stages.run_entry import MachineEntry, RunEntry

LIMIT_S = 1.0
"""Goal for 64 machines: building and serialising together."""


def main() -> int:
    """Measure and write; exit code 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--machines", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found = [measure(count, arguments.rounds) for count in arguments.machines]
    document = {"environment": environment(), "goal_s_at_64": LIMIT_S, "results": found}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for one in found:
        print(json.dumps(one))
    wide = next((one for one in found if one["machines"] == 64), None)
    return 0 if wide is None or wide["build_s"] + wide["serialise_s"] <= LIMIT_S else 1


def measure(num_machines: int, rounds: int) -> dict[str, Any]:
    """Return what the DAG of a run on so many machines in two regions costs."""
    entry = entry_of(num_machines)
    build_s, serialise_s = [], []
    for _ in range(rounds):
        started = time.process_time()
        dag = build_run_dag(entry)
        built = time.process_time()
        document = DagSerialization.to_dict(dag)
        build_s.append(built - started)
        serialise_s.append(time.process_time() - built)
    return {
        "machines": num_machines,
        "tasks": len(dag.tasks),
        "edges": sum(len(task.downstream_task_ids) for task in dag.tasks),
        "serialised_bytes": len(json.dumps(document, default=str)),
        "build_s": min(build_s),
        "serialise_s": min(serialise_s),
    }


def entry_of(num_machines: int) -> RunEntry:
    """Return the entry of a run of 50 iterations."""
    regions = ("east", "west")
    machines = tuple(
        MachineEntry(name=f"m-{number}", queue=f"q-{number}", region=regions[number % 2])
        for number in range(num_machines)
    )
    used = {machine.region for machine in machines}
    return RunEntry(
        run="wide", roots={name: f"s3://rl-{name}/runs" for name in used}, machines=machines, iterations=50,
        evaluate_every=1, profile_every=1,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
