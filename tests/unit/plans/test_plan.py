"""Plans: form, rules against cluster and job, mismatch."""

from __future__ import annotations

import copy
import json

import pytest

from plans.errors import FaultKind, PlanMismatchError, SpecError
from plans.plan import check_plan, plan_faults
from plans.plan_load import load_plan
from plans.workflow import workflow_of
from tests.helpers.planner_cases import paper_cluster, paper_job

CLUSTER = paper_cluster([("A100-40", "va", 4)])
JOB = paper_job()
TASKS = [task.value for task in workflow_of(JOB).tasks]


def document(**changes: object) -> dict:
    replica = {"samples": 3072, "micro_batch_size": 1,
               "stages": [{"layers": 20, "gpus": ["m0/0"]}, {"layers": 16, "gpus": ["m0/1"]}]}  # fmt: skip
    task = {"dp": 1, "pp": 2, "tp": 1, "replicas": [replica]}
    return {
        "format": "motley.plan/1", "method": "hand", "cluster": CLUSTER.fingerprint, "job": JOB.fingerprint,
        "groups": [{"tasks": TASKS, "gpus": ["m0/0", "m0/1"]}],
        "tasks": {name: copy.deepcopy(task) for name in TASKS}, "predicted": {}, "search": {},
    } | changes  # fmt: skip


def faults_of(plan: dict, job=JOB) -> list[tuple[str, FaultKind]]:
    return [(fault.field, fault.kind) for fault in plan_faults(load_plan(json.dumps(plan), "p.json"), CLUSTER, job)]


def test_contract_example_passes_and_round_trips() -> None:
    plan = load_plan(json.dumps(document()), "p.json")
    check_plan(plan, CLUSTER, JOB)
    assert json.loads(plan.to_json()) == document()


def test_search_record_and_prediction_round_trip() -> None:
    search = {"evaluations": 7, "wall_s": 0.5, "seed": 1, "optimal": None, "bound_s": None,
              "trace": [[0.1, 1, 9.0], [0.2, 5, 8.0]]}  # fmt: skip
    plan = load_plan(json.dumps(document(search=search, predicted={"iteration_s": 8.0})), "p.json")
    assert plan.to_document()["search"] == search
    assert plan.to_document()["predicted"] == {"iteration_s": 8.0}
    assert plan.fingerprint == load_plan(json.dumps(document()), "p.json").fingerprint


def test_every_violation_is_listed() -> None:
    plan = document()
    broken = plan["tasks"]["actor_training"]
    broken["dp"] = 2
    broken["replicas"][0]["samples"] = 3000
    broken["replicas"][0]["decode_batch"] = 5
    broken["replicas"][0]["stages"][0] = {"layers": 19, "gpus": ["m0/1", "m9/0", "m0/3"]}
    assert faults_of(plan) == [
        ("tasks.actor_training", FaultKind.CONFLICT),
        ("tasks.actor_training.replicas[0].stages[0].gpus", FaultKind.UNKNOWN_NAME),
        ("tasks.actor_training.replicas[0].stages[1].gpus", FaultKind.CONFLICT),
        ("tasks.actor_training.dp", FaultKind.CONFLICT),
        ("tasks.actor_training.replicas[0].stages[0].gpus", FaultKind.CONFLICT),
        ("tasks.actor_training.replicas", FaultKind.CONFLICT),
        ("tasks.actor_training.replicas[0].stages", FaultKind.CONFLICT),
        ("tasks.actor_training.replicas[0].decode_batch", FaultKind.CONFLICT),
    ]
    with pytest.raises(SpecError, match="add up to the model's 36"):
        check_plan(load_plan(json.dumps(plan), "p.json"), CLUSTER, JOB)


def test_a_gpu_that_does_not_exist_is_one_fault() -> None:
    plan = document()
    plan["tasks"]["actor_training"]["replicas"][0]["stages"][0]["gpus"] = ["m9/0"]
    assert faults_of(plan) == [("tasks.actor_training.replicas[0].stages[0].gpus", FaultKind.UNKNOWN_NAME)]


def test_grouping_faults_are_listed() -> None:
    groups = [{"tasks": TASKS[:2], "gpus": ["m0/0", "m0/1"]}, {"tasks": TASKS[1:5], "gpus": ["m0/1", "m7/7"]}]
    plan = document(groups=groups)
    del plan["tasks"]["reward_inference"]
    fields = faults_of(plan)
    assert fields[:2] == [("tasks", FaultKind.MISSING), ("groups[0].tasks", FaultKind.CONFLICT)]
    assert ("groups[1].gpus", FaultKind.UNKNOWN_NAME) in fields
    assert ("groups[1].gpus", FaultKind.CONFLICT) in fields
    assert ("groups", FaultKind.MISSING) in fields
    assert ("tasks.actor_training", FaultKind.CONFLICT) in fields


def test_async_generation_must_be_alone() -> None:
    job = paper_job(mode="async")
    assert faults_of(document(job=job.fingerprint), job) == [("groups[0].tasks", FaultKind.CONFLICT)]


def test_uneven_tp_needs_the_hetero_flag() -> None:
    plan = document(groups=[{"tasks": TASKS, "gpus": ["m0/0", "m0/1", "m0/2"]}])
    task = plan["tasks"]["actor_training"]
    task["replicas"][0]["stages"][0]["gpus"] = ["m0/0", "m0/2"]
    assert faults_of(plan) == [("tasks.actor_training.replicas[0].stages[0].gpus", FaultKind.CONFLICT)]
    task |= {"hetero_tp": True, "tp": 2}
    assert faults_of(plan) == []


@pytest.mark.parametrize("what", ["cluster", "job"])
def test_plan_of_another_document_is_a_mismatch(what: str) -> None:
    plan = load_plan(json.dumps(document(**{what: "ab" * 32})), "p.json")
    with pytest.raises(PlanMismatchError, match=f"p.json: the plan was made for another {what}") as caught:
        check_plan(plan, CLUSTER, JOB, source_name="p.json")
    assert (caught.value.what, caught.value.found) == (what, "ab" * 32)


def test_form_faults_of_a_plan_are_reported_together() -> None:
    plan = document(extra=1)
    plan["tasks"]["actor_training"]["dp"] = 0
    plan["tasks"]["actor_traning"] = plan["tasks"].pop("critic_training")
    with pytest.raises(SpecError) as caught:
        load_plan(json.dumps(plan), "p.json")
    assert {fault.field for fault in caught.value.faults} == {
        "extra", "tasks.actor_training.dp", "tasks.actor_traning"}  # fmt: skip
