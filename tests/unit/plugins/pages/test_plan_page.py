"""The page *Plan* against the plan and record that it shows."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from plans.cost.report import CostReport
from plans.spec.job import Mode
from plugins.pages.gantt import measured_spans, predicted_spans
from tests.helpers.page_runs import CLUSTER, DAG_ID, make_plans, record_of, sentence
from tests.helpers.storage_builders import RUN

URL = f"/dags/{DAG_ID}/plan"


@pytest.mark.parametrize(("query", "number"), [("", 1), ("?plan=0", 0), ("?iteration=1", 0), ("?iteration=3", 1)])
def test_plan_is_the_one_that_was_asked_for(client: TestClient, query: str, number: int) -> None:
    text = client.get(URL + query).text
    assert f"<h2>Plan {number}, in force from iteration {2 * number}</h2>" in text
    assert client.get(f"/dags/{DAG_ID}/dag_runs/scheduled__iter-1/plan").headers["location"] == f"{URL}?iteration=1"


def test_every_gpu_is_drawn_with_what_it_does_and_how_full_it_is(client: TestClient) -> None:
    plan = make_plans()[0]
    report = CostReport.model_validate(plan.predicted)
    text = client.get(f"{URL}?plan=0").text
    for gpu in CLUSTER.view.gpu_ids:
        tasks = [task.value for task, placed in plan.tasks.items() if gpu in placed.gpus]
        assert f"<title>{gpu}: {', '.join(tasks) or 'no work'}</title>" in text
        if gpu in report.memory:
            used = report.memory[gpu].model_gb + report.memory[gpu].working_gb
            assert f"{used:.3g} of {report.memory[gpu].capacity_gb:.3g} GB" in text


def test_history_says_why_each_plan_came(client: TestClient) -> None:
    text = client.get(URL).text.partition('id="history"')[2]
    assert re.findall(r"plan=(\d)", text) == ["1", "0"]
    assert "the cluster changed" in text
    assert "the first plan of the run" in text


def test_what_is_not_there_is_answered_with_a_sentence(client: TestClient) -> None:
    assert sentence(client, f"{URL}?plan=7")[1] == f"Run {RUN} has no plan 7: its plans are 0 to 1."
    assert sentence(client, f"{URL}?iteration=88")[1].startswith(f"Iteration 88 of run {RUN} does not exist")
    assert sentence(client, f"{URL}?plan=x")[0] == 400


def test_predicted_spans_follow_each_other_by_phase() -> None:
    report = CostReport.model_validate(make_plans()[0].predicted)
    assert report.phases is not None
    spans = {span.name: span for span in predicted_spans(report, Mode.SYNC)}
    assert spans["actor_generation"].start_s == 0.0
    assert spans["reference_inference"].start_s == report.phases.generation_s
    assert spans["actor_training"].start_s == report.phases.generation_s + report.phases.inference_s
    overlapping = {span.name: span for span in predicted_spans(report, Mode.ASYNC)}
    assert overlapping["reference_inference"].start_s == 0.0


def test_measured_spans_are_stages_and_the_gaps_between_them() -> None:
    spans = [(span.name, span.start_s, span.end_s) for span in measured_spans(record_of(0))]
    assert spans == [
        ("plan", 0.0, 1.0), ("generate", 1.5, 11.5), ("infer", 12.5, 14.5), ("train", 15.0, 23.0),
        ("commit_policy", 23.0, 24.0),
    ]  # fmt: skip


def test_stages_side_by_side_start_together() -> None:
    measured = {"generate": 4.0, "reward_inference": 1.0, "critic_inference": 2.0, "train": 3.0, "critic_training": 1.0}
    gaps = {"generate->reward_inference": 1.0, "reward_inference->train": 0.5}
    spans = {s.name: s for s in measured_spans(record_of(0, measured_s=measured, metadata={"gaps_s": gaps}))}
    assert spans["reward_inference"].start_s == spans["critic_inference"].start_s == 5.0
    assert spans["train"].start_s == spans["critic_training"].start_s == 7.5
