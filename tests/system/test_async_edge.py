"""The example `async-edge` through a real Airflow: two Edge workers as producer and consumer, both killed in turn.

The planner decides which machine samples; the roles are read from the committed plan. A machine's death takes its
worker, task and stage processes and engines at once, as a loss of power would.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from plans.plan_load import plan_from_document
from plans.workflow import RlTask
from stages.contract import StageName
from stages.staleness.buffer import RolloutBuffer
from storage.checkpoints import load_checkpoint
from storage.iterations import find_records
from storage.policies import head_version
from storage.rollouts import read_rollouts
from storage.runs import read_plan
from storage.sql import connect
from tests.system.deployed import REPOSITORY, Deployment, deployment, kill, needs_engines, outcome, trainings, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(3600),
    needs_engines,
]

EXAMPLE = REPOSITORY / "examples" / "async-edge"
RUN = "async-edge"
ITERATIONS = 6
PROMPTS, RESPONSES = 64, 8
COMMAND_S = 3000.0
"""Longest command; a crowded machine is many times slower than an idle one."""


def small_job(folder: Path) -> str:
    """Return the example's job with a smaller batch and warm-up: everything else is what the example says."""
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job["batch"]["prompts"] = PROMPTS
    job["generation"]["max_num_seqs"] = job["storage"]["samples_per_shard"] = 128
    job["source"]["warm_up"] = {"target_score": 0.02, "check_every": 20, "max_steps": 2000}
    job["evaluation"] |= {"every": 3, "prompts": 50}
    job["storage"] |= {"keep_policies": 20, "keep_checkpoints": 20}
    job["engines"]["start_timeout_s"] = 1500
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return str(file)


def machine_of(found: Deployment, task: RlTask) -> str:
    """Return the machine that the first plan gives a task."""
    plan = plan_from_document(read_plan(found.store, RUN, 0), "plan 0")
    machines = {gpu.partition("/")[0] for gpu in plan.tasks[task].gpus}
    assert len(machines) == 1
    return machines.pop()


def check_run(found: Deployment) -> None:
    """Check what must hold however often a worker died."""
    store = found.store
    assert head_version(store, RUN) == ITERATIONS
    assert [record.iteration for record in find_records(store, RUN)] == list(range(ITERATIONS))
    assert [trainings(found, k) for k in range(ITERATIONS)] == [1] * ITERATIONS
    with connect(store, RUN) as sql:
        rows = sql.sql(
            "SELECT iteration, count(*), count(DISTINCT row_id), max(trained_policy_version - policy_version_first), "
            "min(trained_policy_version - policy_version_first) FROM completions "
            "WHERE split = 'train' GROUP BY 1 ORDER BY 1"
        ).fetchall()
    size = PROMPTS * RESPONSES
    assert [row[:3] for row in rows] == [(k, size, size) for k in range(ITERATIONS)]
    assert all(0 <= row[4] <= row[3] <= 1 for row in rows)
    buffer = RolloutBuffer.from_json(load_checkpoint(store, RUN, ITERATIONS).manifest.metadata["buffer"], ITERATIONS)
    assert (buffer.num_made, buffer.num_trained, buffer.num_withheld) == (ITERATIONS * PROMPTS,) * 2 + (0,)
    assert outcome(found.motley("verify", RUN, "--json", timeout_s=COMMAND_S))["is_good"]


def test_producer_and_consumer_are_killed_in_turn_and_the_run_ends_whole(tmp_path: Path) -> None:
    cluster = str(EXAMPLE / "cluster.yaml")
    with deployment(tmp_path / "home") as found:
        up = found.motley("up", "--cluster", cluster, "--json", timeout_s=COMMAND_S)
        assert outcome(up)["workers"] == ["left", "right"]
        started = found.motley(
            "run", "--job", small_job(tmp_path), "--cluster", cluster, "--name", RUN, "--iterations", str(ITERATIONS),
            "--detach", timeout_s=COMMAND_S,
        )  # fmt: skip
        assert started.returncode == 0, started.stderr
        until(lambda: found.attempts(StageName.GENERATE.value, 1), "generation of iteration 1", COMMAND_S)
        producer, consumer = (machine_of(found, t) for t in (RlTask.ACTOR_GENERATION, RlTask.ACTOR_TRAINING))
        assert producer != consumer

        for stage, iteration, machine in ((StageName.GENERATE, 2, producer), (StageName.TRAIN, 3, consumer)):
            until(lambda s=stage, k=iteration: found.attempts(s.value, k), f"{stage} of {iteration}", COMMAND_S)
            assert kill(found.machine(machine)) > 1
            sick = found.motley("doctor", RUN, "--json", timeout_s=COMMAND_S)
            assert sick.returncode == 1
            assert "run `motley up`" in sick.stdout
            again = found.motley("up", "--cluster", cluster, "--json", timeout_s=COMMAND_S)
            assert again.returncode == 0, again.stderr

        done = found.motley("resume", RUN, "--json", timeout_s=COMMAND_S)
        assert done.returncode == 0, done.stderr
        check_run(found)
        for k in range(ITERATIONS):
            rows = read_rollouts(found.store, RUN, k, columns=["machine"])
            assert set(rows.column("machine").to_pylist()) == {producer}
