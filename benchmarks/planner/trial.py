"""One search, run in a process of its own so that caches and memory of other searches do not count."""

from __future__ import annotations

import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

from plans.cost.model import CostModel
from plans.errors import InfeasibleError, SearchError
from plans.search.balancing import Balancing
from plans.search.budget import Budget
from plans.search.planner import make_plan
from plans.search.sha_ea import ShaEaPlanner
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed
from plans.testbeds.testbed import machine_subset


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What to search, and how."""

    testbed: str
    size: str
    algorithm: str
    mode: str
    method: str = "sha-ea"
    budget: str = "10s"
    seed: int = 0
    model: str = "paper"
    workers: int = 1
    balanced: bool = True
    subset: tuple[tuple[str, int], ...] = ()
    processor_time: bool = False
    """Whether a budget in seconds counts processor seconds (one process), so that a busy machine changes nothing."""


def run_trial(trial: Trial) -> dict[str, Any]:
    """Return the trial with its outcome; a search without a plan has its reason instead."""
    context = get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(search, trial).result()


def search(trial: Trial) -> dict[str, Any]:
    """Search in this process."""
    cluster = cluster_of(trial)
    job = hetrl_job(trial.size, Algorithm(trial.algorithm), Mode(trial.mode))
    model = CostModel.paper() if trial.model == "paper" else CostModel.calibrated()
    method = trial.method if trial.balanced else ShaEaPlanner(balancing=Balancing.none())
    row: dict[str, Any] = asdict(trial)
    begin = time.process_time()
    clock = time.process_time if trial.processor_time else time.monotonic
    try:
        result = make_plan(cluster, job, method, model, Budget.parse(trial.budget), trial.seed, trial.workers, clock)
    except (InfeasibleError, SearchError) as error:
        return row | {"iteration_s": None, "reason": str(error), "cpu_s": time.process_time() - begin}
    search_record = result.search
    return row | {
        "iteration_s": result.iteration_s,
        "evaluations": search_record.evaluations,
        "wall_s": search_record.wall_s,
        "cpu_s": time.process_time() - begin,
        "optimal": search_record.optimal,
        "bound_s": search_record.bound_s,
        "trace": [list(point) for point in search_record.trace],
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "usd_per_hour": result.report.usd_per_hour,
        "plan": result.plan.to_document() | {"predicted": {}, "search": {}},
    }


def cluster_of(trial: Trial) -> Any:  # noqa: ANN401 - a Cluster, kept loose for pickling helpers
    """Return the trial's cluster: the testbed, or the part of it that `subset` names."""
    testbed = find_testbed(trial.testbed)
    if trial.subset:
        testbed = machine_subset(testbed, dict(trial.subset), name=trial.testbed)
    return testbed.cluster
