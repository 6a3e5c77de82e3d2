from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("airflow.sdk")

from airflow.models.serialized_dag import SerializedDagModel
from airflow.sdk import TriggerRule
from airflow.serialization.serialized_objects import DagSerialization

from cli.deployment_settings import edge_environment
from plugins.iteration_dag import build_run_dag, build_run_dags
from plugins.stage_operator import PLANNED_STAGES
from stages.run_entry import MachineEntry, RunEntry


def machine(name: str, region: str) -> MachineEntry:
    return MachineEntry(name=name, queue=f"q-{name}", region=region)


ONE = RunEntry(run="demo", roots={"local": "file:///data"}, machines=(machine("a", "local"),), iterations=5)
TWO = RunEntry(
    run="wide",
    roots={"east": "s3://east", "west": "s3://west"},
    machines=(machine("a", "east"), machine("b", "west")),
    iterations=7,
    max_staleness=2,
)


def edges(entry: RunEntry) -> dict[str, list[str]]:
    return {task.task_id: sorted(task.downstream_task_ids) for task in build_run_dag(entry).tasks}


def test_dag_of_one_machine_is_a_chain() -> None:
    assert edges(ONE) == {
        "wait_for_policy": ["profile.q-a"],
        "profile.q-a": ["plan"],
        "plan": ["prepare.q-a"],
        "prepare.q-a": ["generate.q-a"],
        "generate.q-a": ["infer.q-a"],
        "infer.q-a": ["train.q-a"],
        "train.q-a": ["commit_policy"],
        "commit_policy": ["sync.local"],
        "sync.local": ["evaluate.q-a", "report"],
        "evaluate.q-a": ["report"],
        "report": [],
    }


def test_dag_of_two_machines_has_a_row_per_queue_and_region_and_a_gate_before_training() -> None:
    found = edges(TWO)
    assert found["wait_for_policy"] == ["profile.q-a", "profile.q-b"]
    assert found["plan"] == ["prepare.q-a", "prepare.q-b"]
    assert found["prepare.q-b"] == ["generate.q-a", "generate.q-b"]
    assert found["generate.q-a"] == found["generate.q-b"] == ["infer.q-a", "infer.q-b"]
    assert found["infer.q-b"] == ["wait_for_turn"]
    assert found["wait_for_turn"] == ["train.q-a", "train.q-b"]
    assert found["commit_policy"] == ["sync.east", "sync.west"]
    assert found["sync.west"] == ["evaluate.q-a", "evaluate.q-b", "report"]


def test_ppo_has_a_row_per_task_side_by_side_as_in_the_papers_graph() -> None:
    found = edges(ONE.model_copy(update={"algorithm": "ppo"}))
    inference = ["critic_inference.q-a", "reference_inference.q-a", "reward_inference.q-a"]
    training = ["critic_training.q-a", "train.q-a"]
    assert found["generate.q-a"] == inference
    assert all(found[row] == training for row in inference)
    assert all(found[row] == ["commit_policy"] for row in training)
    assert "infer.q-a" not in found


def test_asynchronous_ppo_waits_for_its_turn_before_the_critics_values() -> None:
    found = edges(TWO.model_copy(update={"algorithm": "ppo"}))
    critic = ["critic_inference.q-a", "critic_inference.q-b"]
    assert found["generate.q-a"] == [
        "reference_inference.q-a", "reference_inference.q-b", "reward_inference.q-a", "reward_inference.q-b",
        "wait_for_turn",
    ]  # fmt: skip
    assert set(critic) <= set(found["wait_for_turn"])
    assert set(found["critic_inference.q-b"]) == {
        "critic_training.q-a", "critic_training.q-b", "train.q-a", "train.q-b"
    }  # fmt: skip
    assert found["critic_inference.q-b"] == found["reward_inference.q-a"]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("entry", [ONE, TWO, TWO.model_copy(update={"max_staleness": 0})])
@pytest.mark.parametrize(
    ("iteration", "queues"), [(0, ["q-a"]), (0, ["q-a", "q-b"]), (1, ["q-a"]), (1, ["q-b"]), (4, ["q-b"])]
)
def test_no_row_overtakes_one_that_has_work_when_the_plan_skips_others(
    entry: RunEntry, algorithm: str, iteration: int, queues: list[str]
) -> None:
    """The plan skips rows at once; a rule that looks at direct upstreams only must not let a later row start early."""
    dag = build_run_dag(entry.model_copy(update={"algorithm": algorithm, "evaluate_every": 2}))
    plan: Any = dag.get_task("plan")
    wanted = dict.fromkeys(PLANNED_STAGES, queues)
    skipped = set(plan.idle_rows(iteration, {stage.value: names for stage, names in wanted.items()}))
    settled = {*skipped, "plan", *plan.get_flat_relative_ids(upstream=True)}
    while waiting := [task for task in dag.tasks if task.task_id not in settled]:
        ready = [task for task in waiting if task.upstream_task_ids <= settled]
        assert ready
        for task in ready:
            assert task.get_flat_relative_ids(upstream=True) <= settled, task.task_id
        settled.add(ready[0].task_id)


def test_dag_settings_follow_from_the_staleness_bound() -> None:
    sync, asynchronous = build_run_dag(ONE), build_run_dag(TWO)
    assert (sync.max_active_runs, sync.max_consecutive_failed_dag_runs) == (1, 1)
    assert (asynchronous.max_active_runs, asynchronous.max_consecutive_failed_dag_runs) == (3, 0)
    assert sync.catchup
    assert {kind.value for kind in sync.allowed_run_types or ()} == {"scheduled", "backfill"}


def test_every_task_has_owner_retries_policy_queue_and_a_rule_that_passes_over_skipped_rows() -> None:
    for task in build_run_dag(TWO).tasks:
        assert (task.owner, task.retries, task.depends_on_past) == ("motley", 3, False)
        assert task.retry_policy is not None
        assert task.queue in {"q-a", "q-b"}
        assert task.trigger_rule == TriggerRule.NONE_FAILED


def test_rows_run_on_their_machines_queue_and_root() -> None:
    tasks = {task.task_id: task for task in build_run_dag(TWO).tasks}
    sync: Any = tasks["sync.west"]
    assert (sync.queue, sync.stage_params, sync.request(0).root) == ("q-b", {"region": "west"}, "s3://west")


@pytest.mark.parametrize("entry", [ONE, TWO, TWO.model_copy(update={"algorithm": "ppo"})])
def test_serialised_dag_is_the_same_in_every_process(entry: RunEntry) -> None:
    """No churn of DAG versions: the scheduler makes a new version whenever the serialised form differs."""
    script = (
        "import sys\nfrom airflow.models.serialized_dag import SerializedDagModel\n"
        "from airflow.serialization.serialized_objects import DagSerialization\n"
        "from plugins.iteration_dag import build_run_dag\nfrom stages.run_entry import RunEntry\n"
        "entry = RunEntry.model_validate_json(sys.stdin.read())\n"
        "print('@' + SerializedDagModel.hash(DagSerialization.to_dict(build_run_dag(entry))))"
    )

    def hash_elsewhere(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=entry.to_json(), env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.rpartition("@")[2].strip()

    here = SerializedDagModel.hash(DagSerialization.to_dict(build_run_dag(entry)))
    assert [hash_elsewhere("1"), hash_elsewhere("2")] == [here, here]


def test_serialised_dag_keeps_the_timetable() -> None:
    again = DagSerialization.from_dict(DagSerialization.to_dict(build_run_dag(ONE)))
    assert again.timetable.serialize() == {"run": "demo", "iterations": 5}


def test_unusable_entry_hides_no_other_run(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text(ONE.to_json())
    (tmp_path / "broken.json").write_text("{")
    found = build_run_dags([tmp_path / "broken.json", tmp_path / "demo.json"])
    assert set(found) == {"motley__demo", "motley_rescore__demo"}


def test_only_the_wanted_dag_is_built(tmp_path: Path) -> None:
    for entry in (ONE, TWO):
        (tmp_path / f"{entry.run}.json").write_text(entry.to_json())
    assert list(build_run_dags(sorted(tmp_path.iterdir()), wanted="motley__wide")) == ["motley__wide"]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("lead", [0, 2])
def test_no_bound_of_airflow_keeps_rows_of_a_stage_from_running_at_once(algorithm: str, lead: int) -> None:
    """A training gang meets only if all its rows run; Airflow's default of 16 tasks per DAG would keep 64 apart."""
    entry = RunEntry.model_validate(
        {
            "run": "wide", "roots": {"here": "/data"}, "iterations": 3, "algorithm": algorithm, "max_staleness": lead,
            "machines": [machine(f"m{number}", "here").model_dump() for number in range(64)],
        }
    )  # fmt: skip
    dag = build_run_dag(entry)
    widest = max(sum(a.task_id.startswith(f"{stage}.") for a in dag.tasks) for stage in PLANNED_STAGES)
    side_by_side = {"grpo": 1, "ppo": 3}[algorithm]
    assert widest == 64
    assert dag.max_active_tasks >= widest * side_by_side * (lead + 1)
    edge = edge_environment("http://localhost")
    for bound in (edge["AIRFLOW__CORE__PARALLELISM"], edge["AIRFLOW__SCHEDULER__MAX_TIS_PER_QUERY"]):
        assert int(bound) >= widest * side_by_side
