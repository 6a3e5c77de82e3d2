"""Two machines with a worker each (both this computer): where tasks run, a killed worker, and a long run's operations.

One run in the order in which a person would do these things; every test builds on the one before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.deployment_api import AirflowApi
from plans.plan import Plan
from plans.plan_load import plan_from_document
from plans.workflow import RlTask
from stages.home import dag_id_of
from stages.launch import all_attempts
from stages.runs import load_run
from storage.parsed_keys import Kind, parse_key
from storage.policies import head_version, read_head, resolve_policy
from storage.rollouts import read_rollouts
from storage.runs import read_iteration, read_plan
from storage.superseded import superseded_manifests
from tests.system.deployed import Deployment, deployment, kill, needs_engines, outcome, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(3600),
    needs_engines,
]

SPECS = Path(__file__).parent / "specs"
CLUSTER = str(SPECS / "two_machines.yaml")
REWARD = 'rewards.terms=[{name: format, options: {pattern: "[0-9]*[02468]"}}]'
"""Half of all answers are even numbers: unlike right answers of a model so small, every prompt group has both kinds."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("pool")) as found:
        yield found


def machines_of(found: Deployment, iteration: int) -> set[str]:
    rows = read_rollouts(found.store, "tiny", iteration, columns=["machine"])
    return set(rows.column("machine").to_pylist())


def rows_on(found: Deployment, machine: str, iteration: int) -> set[str]:
    """Return the rows that a machine's worker has run in an iteration, by its own job folders."""
    state_dir = found.home.worker_home(machine).state_dir(machine)
    return {a.folder.parts[-3] for a in all_attempts(state_dir) if a.folder.parts[-4] == f"{iteration:06d}"}


def worker_pid(found: Deployment, machine: str) -> int:
    process = next(worker.process for worker in found.record.workers if worker.machine == machine)
    assert process is not None
    return process.pid


def all_states(found: Deployment, run: str = "tiny") -> list[tuple[str, str]]:
    with AirflowApi(found.record.url) as api:
        return [(item["state"], item["run_type"]) for item in api.dag_runs(dag_id_of(run))]


def test_up_with_a_cluster_file_starts_a_worker_for_every_machine(pool: Deployment) -> None:
    assert outcome(pool.motley("up", "--cluster", CLUSTER, "--json"))["workers"] == ["trainer", "sampler"]
    status = outcome(pool.motley("status", "--json"))
    facts = [(w["machine"], w["queue"], w["region"], w["gpu"], w["state"]) for w in status["workers"]]
    assert facts == [
        ("trainer", "q-trainer", "here", "cpu", "idle"), ("sampler", "q-sampler", "here", "cpu", "idle"),
    ]  # fmt: skip
    with AirflowApi(pool.record.url) as api:
        info = {worker["worker_name"]: worker["sysinfo"] for worker in api.workers()}
    assert (info["sampler"]["gpu"], info["sampler"]["gpu_count"], info["sampler"]["region"]) == ("cpu", 1, "here")
    assert outcome(pool.motley("doctor", "--cluster", CLUSTER, "--json"))["is_good"]


def test_second_worker_of_a_name_and_a_typo_are_refused_with_a_sentence(pool: Deployment) -> None:
    typo = pool.motley("worker", "--machine", "sampelr", "--cluster", CLUSTER)
    assert (typo.returncode, typo.stderr.strip()) == (
        2, "Cluster two-machines has no machine 'sampelr'; its machines are trainer, sampler.",
    )  # fmt: skip
    second = pool.motley("worker", "--machine", "sampler", "--cluster", CLUSTER)
    assert second.returncode == 2
    assert second.stderr.startswith("Machine sampler has a worker already (state idle")


def test_run_is_spread_over_the_machines_as_the_planner_says(pool: Deployment) -> None:
    done = pool.motley(
        "run", "--job", str(SPECS / "tiny_job.yaml"), "--cluster", CLUSTER, "--name", "tiny", "--iterations", "2",
        "--json", timeout_s=3000,
    )  # fmt: skip
    assert outcome(done)["state"] == "finished"
    document = read_plan(pool.store, "tiny", 0)
    plan = plan_from_document(document, "plan 0")
    assert (plan.method, plan.search.seed) == ("sha-ea", 7)
    planner = read_iteration(pool.store, "tiny", 1).metadata["planner"]
    assert (planner["method"], planner["seed"], planner["budget"]) == ("sha-ea", 7, "1000evals")
    assert planner["model"] == "calibrated: profiles of trainer, sampler"
    for k in range(2):
        placed = {gpu.partition("/")[0] for gpu in plan.tasks[RlTask.ACTOR_GENERATION].gpus}
        assert machines_of(pool, k) == placed
        training = plan.tasks[RlTask.ACTOR_TRAINING].gpus[0].partition("/")[0]
        assert f"train.q-{training}" in rows_on(pool, training, k)
        assert read_iteration(pool.store, "tiny", k).metadata["missing"] == []
    assert {state for state, _ in all_states(pool)} == {"success"}


def apart(plan: Plan) -> dict[str, Any]:
    """Return a plan that samples on the sampler and does everything else on the trainer."""
    document: dict[str, Any] = json.loads(plan.to_json())
    others = [task for task in document["tasks"] if task != "actor_generation"]
    document["groups"] = [
        {"tasks": ["actor_generation"], "gpus": ["sampler/0"]}, {"tasks": others, "gpus": ["trainer/0"]},
    ]  # fmt: skip
    for name, task in document["tasks"].items():
        replica = task["replicas"][0]
        layers = sum(stage["layers"] for stage in replica["stages"])
        gpu = "sampler/0" if name == "actor_generation" else "trainer/0"
        replica |= {"samples": 64, "stages": [{"layers": layers, "gpus": [gpu]}]}
        task |= {"dp": 1, "pp": 1, "tp": 1, "replicas": [replica]}
    return document


def test_plan_by_hand_and_extension_put_generation_and_training_on_different_queues(
    pool: Deployment, tmp_path: Path
) -> None:
    plan = plan_from_document(read_plan(pool.store, "tiny", 0), "plan 0")
    (tmp_path / "plan.json").write_text(json.dumps(apart(plan)))
    replanned = outcome(pool.motley("replan", "tiny", "--plan", str(tmp_path / "plan.json"), "--json"))
    assert replanned == {"run": "tiny", "plan": 1, "from_iteration": 2}
    assert outcome(pool.motley("extend", "tiny", "--iterations", "4", "--json"))["iterations"] == 4
    assert outcome(pool.motley("resume", "tiny", "--json", timeout_s=3000))["policy_version"] == 4
    for k in (2, 3):
        assert machines_of(pool, k) == {"sampler"}
        assert {row for row in rows_on(pool, "trainer", k) if row.startswith(("generate", "train"))} == {
            "train.q-trainer"
        }
        assert {row for row in rows_on(pool, "sampler", k) if row.startswith(("generate", "train"))} == {
            "generate.q-sampler"
        }


def test_run_survives_the_death_of_a_worker_with_everything_below_it(pool: Deployment) -> None:
    """As if the machine lost power: worker, task and stage process and engines are killed in the middle of sampling."""
    pool.motley("extend", "tiny", "--iterations", "6")
    until(lambda: "generate.q-sampler" in rows_on(pool, "sampler", 4), "generation of iteration 4", 1800)
    assert kill(pool.machine("sampler")) > 1
    status = pool.motley("doctor", "tiny", "--json")
    assert status.returncode == 1
    assert "run `motley up`" in status.stdout
    done = pool.motley("resume", "tiny", "--json", timeout_s=3000)
    assert outcome(done)["policy_version"] == 6
    assert machines_of(pool, 4) == machines_of(pool, 5) == {"sampler"}
    assert outcome(pool.motley("verify", "tiny", "--json"))["is_good"]


def test_pause_stop_and_retry_are_what_they_say(pool: Deployment) -> None:
    pool.motley("extend", "tiny", "--iterations", "7")
    until(lambda: rows_on(pool, "sampler", 6), "work on iteration 6", 1800)
    assert outcome(pool.motley("stop", "tiny", "--json"))["iterations_ended"] == [6]
    assert ("failed", "scheduled") in all_states(pool)
    refused = pool.motley("unpause", "tiny")
    assert "has failed iterations (6), which unpausing would leave behind" in refused.stderr
    refused = pool.motley("retry", "tiny", "--iteration", "5")
    assert (refused.returncode, refused.stderr.startswith("Iteration 5 of run tiny is done")) == (2, True)
    done = outcome(pool.motley("retry", "tiny", "--iteration", "6", "--json", timeout_s=3000))
    assert (done["state"], head_version(pool.store, "tiny")) == ("success", 7)
    assert outcome(pool.motley("pause", "tiny", "--json"))["state"] == "paused"
    assert outcome(pool.motley("unpause", "tiny", "--json"))["state"] == "running"


def test_rewound_run_makes_later_versions_anew_and_keeps_the_old_ones_aside(pool: Deployment) -> None:
    before = {v: resolve_policy(pool.store, "tiny", v).weights_hash for v in range(8)}
    old = read_rollouts(pool.store, "tiny", 5, columns=["row_id"]).column("row_id").to_pylist()
    refused = pool.motley("rewind", "tiny", "--to", "7")
    assert refused.stderr.strip() == ("Run tiny can go back to the policy versions 0 to 6 (its newest is 7), not to 7.")
    done = pool.motley("rewind", "tiny", "--to", "5", "--reason", "try again", "--json", timeout_s=3000)
    assert outcome(done)["policy_version"] == 7
    after = {v: resolve_policy(pool.store, "tiny", v).weights_hash for v in range(8)}
    assert [before[v] == after[v] for v in range(8)] == [True] * 6 + [False] * 2
    new = read_rollouts(pool.store, "tiny", 5, columns=["row_id"]).column("row_id").to_pylist()
    assert set(new).isdisjoint(old)
    kept = [m for m in superseded_manifests(pool.store, "tiny") if parse_key(m.key).kind is Kind.POLICY]
    assert {m.policy_versions[0]: m.metadata["weights_hash"] for m in kept} == {v: before[v] for v in (6, 7)}
    head = read_head(pool.store, "tiny")
    assert head is not None
    assert [(r.from_version, r.to_version, r.reason) for r in head.rollbacks] == [(7, 5, "try again")]
    assert {state for state, _ in all_states(pool)} == {"success"}
    assert outcome(pool.motley("verify", "tiny", "--json"))["is_good"]


def test_fork_goes_on_from_a_version_with_other_settings_and_leaves_its_parent_alone(pool: Deployment) -> None:
    head = head_version(pool.store, "tiny")
    forked = outcome(
        pool.motley(
            "fork", "tiny", "--from", "6", "--name", "branch", "--set", "optimizer.learning_rate=1e-4", "--set", REWARD,
            "--iterations", "7", "--json",
        )
    )  # fmt: skip
    assert forked["forked_from"]["version"] == 6
    assert outcome(pool.motley("resume", "branch", "--json", timeout_s=3000))["policy_version"] == 7
    assert resolve_policy(pool.store, "branch", 6).weights_hash == resolve_policy(pool.store, "tiny", 6).weights_hash
    assert resolve_policy(pool.store, "branch", 7).weights_hash != resolve_policy(pool.store, "tiny", 7).weights_hash
    assert [item["iteration"] for item in outcome(pool.motley("show", "branch", "--json"))["records"]] == [6]
    assert (head_version(pool.store, "tiny"), len(all_states(pool, "branch"))) == (head, 1)


def test_drained_machine_gets_no_more_work_and_its_worker_is_not_waited_for(pool: Deployment) -> None:
    refused = pool.motley("drain", "tiny", "trainer")
    assert refused.stderr.startswith("Machine trainer plans, commits and reports for run tiny, so it can't be drained")
    assert outcome(pool.motley("drain", "tiny", "sampler", "--json"))["drained"] == ["sampler"]
    kill([psutil.Process(worker_pid(pool, "sampler"))])
    pool.motley("extend", "tiny", "--iterations", "8")
    with AirflowApi(pool.record.url) as api:
        until(lambda: api.count_runs(dag_id_of("tiny"), "success") == 8, "iteration 7 without the sampler", 1800)
    assert machines_of(pool, 7) == {"trainer"}
    assert rows_on(pool, "sampler", 7) == set()
    assert load_run(str(pool.home.store_dir), "tiny").drained == ("sampler",)


def test_down_ends_the_workers_too(pool: Deployment) -> None:
    assert outcome(pool.motley("down", "--json"))["ended"] > 4
    assert pool.everything() == []
