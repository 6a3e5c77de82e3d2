"""StreamRL's allocator over two data centres: one generates, the other trains, and the faster one is cut to measure."""

import pytest

from plans.cost import CostModel
from plans.search.budget import Budget
from plans.search.planner import make_plan
from plans.workflow import RlTask
from tests.helpers.planner_cases import paper_cluster, paper_job

JOB = paper_job("qwen3-1.7b", algorithm="grpo", mode="async", prompts=48)


def sides_of(plan):
    generation = set(plan.tasks[RlTask.ACTOR_GENERATION].gpus)
    return generation, {gpu for placed in plan.tasks.values() for gpu in placed.gpus} - generation


@pytest.mark.parametrize("counts", [(8, 8), (8, 16)])
def test_two_data_centres_take_a_side_each_and_the_faster_one_leaves_gpus_idle(counts):
    cluster = paper_cluster([("A100-40", "east", counts[0]), ("L40S", "west", counts[1])])
    result = make_plan(cluster, JOB, "streamrl", CostModel.calibrated(), Budget(evaluations=60))
    generation, rest = sides_of(result.plan)
    assert {len({gpu.partition("/")[0] for gpu in side}) for side in (generation, rest)} == {1}
    whole = dict(zip(("m0", "m1"), counts, strict=True))
    phases = result.report.phases
    is_generation_faster = phases.generation_s < phases.inference_s + phases.training_s
    faster, slower = (generation, rest) if is_generation_faster else (rest, generation)
    assert len(slower) == whole[min(slower).partition("/")[0]]
    assert len(faster) < whole[min(faster).partition("/")[0]]
    assert result.iteration_s == pytest.approx(min(seconds for _, _, seconds in result.search.trace))
