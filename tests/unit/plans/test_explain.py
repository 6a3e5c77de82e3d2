"""Explanations of plans."""

import pytest

from plans.cost import CostModel
from plans.explain import explain, machines_used, run_lengths
from plans.search.budget import Budget
from plans.search.planner import make_plan
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed


@pytest.mark.parametrize(("values", "text"), [([6, 6, 7], "2x6, 7"), ([1], "1"), ([], ""), ([3, 2, 3, 3], "3, 2, 2x3")])
def test_run_lengths_count_repeats(values, text):
    assert run_lengths(values) == text


def test_machines_used_joins_numbered_runs():
    gpus = ["va-0/0", "va-0/1", "va-1/0", "va-1/3", "va-2/0", "oh-0/0"]
    assert machines_used(gpus) == "va-0..1 x2, va-2 x1, oh-0 x1"


@pytest.mark.parametrize("mode", list(Mode))
def test_explanation_covers_every_task_machine_and_the_money(mode):
    cluster, job = find_testbed("hetrl-multi-region-hybrid-16").cluster, hetrl_job("4b", Algorithm.GRPO, mode)
    result = make_plan(cluster, job, model=CostModel.paper(), budget=Budget(evaluations=100))
    found = explain(cluster, job, result.plan, result.report)
    assert [row.task for row in found.tasks] == [task.value for task in result.plan.tasks]
    assert [row.seconds for row in found.tasks] == [result.report.tasks[task].total_s for task in result.plan.tasks]
    assert sum(row.num_gpus for row in found.memory) == len(result.report.memory)
    assert all(0.0 < row.least_share <= row.most_share <= 1.0 for row in found.memory)
    assert f"{result.report.usd_per_hour:.2f} $/h" in found.cost
    assert ("overlap" in found.limits[0]) == (mode is Mode.ASYNC)
    text = found.text()
    assert all(row.task in text and row.machines in text for row in found.tasks)
