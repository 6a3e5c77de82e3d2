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

The package itself exports nothing: who needs the error tree only (the Airflow side) loads no numpy.
"""
