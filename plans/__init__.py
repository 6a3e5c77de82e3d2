"""The planner: cluster and job documents in, a priced placement out. Pure arithmetic, no files, network or clock.

Overview (each module's docstring says more):

* `plans.spec.load` - `load_cluster(text, source_name)`, `load_job(text, source_name)`; `plans.plan_load` - `load_plan`.
* `plans.spec.cluster` - `Cluster`; `cluster.view` holds arrays over GPUs and machine-by-machine link matrices.
* `plans.spec.job` - `Job`, `plans.spec.llm` - `LlmShape`, `plans.spec.gpu_catalog` - `GpuType`.
* `plans.workflow` - `RlTask`, `TaskKind`, `workflow_of(job)`, `shape_of(job, task)`.
* `plans.plan` - `Plan` and its parts; `check_plan(plan, cluster, job)` raises with every violation.
* `plans.cost` - `price(cluster, job, plan, model)`, `PlanEvaluator` for searches, `CostModel.paper()`, `.calibrated()`.
* `plans.memory` - resident and working bytes per tasklet, constraint C3, decode batch.
* `plans.balance` - samples per replica, layers per pipeline stage, length-aware dispatch.
* `plans.feasibility` - why a job cannot fit, and the cheapest change that would make it fit.
* `plans.errors` - the error tree, root `PlanningError`.
"""

from plans.errors import PlanningError
from plans.plan import Plan, check_plan
from plans.plan_load import load_plan
from plans.spec.cluster import Cluster, single_machine
from plans.spec.job import Job
from plans.spec.load import load_cluster, load_job
from plans.workflow import RlTask, workflow_of

__all__ = [
    "Cluster",
    "Job",
    "Plan",
    "PlanningError",
    "RlTask",
    "check_plan",
    "load_cluster",
    "load_job",
    "load_plan",
    "single_machine",
    "workflow_of",
]
