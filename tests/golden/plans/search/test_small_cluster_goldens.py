"""`sha-ea` on small clusters, where the exact method knows what can be reached."""

from __future__ import annotations

import pytest

from plans.cost import CostModel
from plans.search.budget import Budget
from plans.search.planner import make_plan
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed

#: GPUs -> seconds per iteration of the best plan that `ilp` found (4B GRPO sync, single region, paper model).
BEST_S = {8: 114.15191591199267, 16: 57.14783762882855, 24: 51.01872135366068}
EVALUATIONS = 2500


@pytest.mark.parametrize("gpus", list(BEST_S))
def test_search_is_within_a_percent_of_the_exact_method(gpus: int) -> None:
    """At 24 GPUs it once stayed 3.65 % above: six stages were not on offer, nor slow GPUs as ends of all pipelines."""
    cluster = find_testbed(f"hetrl-single-region-{gpus}").cluster
    job = hetrl_job("4b", Algorithm.GRPO, Mode.SYNC)
    found = make_plan(cluster, job, "sha-ea", CostModel.paper(), Budget(evaluations=EVALUATIONS), seed=1)
    assert found.iteration_s <= 1.01 * BEST_S[gpus]
