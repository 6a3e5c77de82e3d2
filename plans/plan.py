"""The plan document `motley.plan/1`: which GPUs run which tasklet of which task.

Owns the value types, their JSON form and `plan_faults`, which checks a plan against a cluster and a job and lists
every violation. A tasklet is one (replica, pipeline stage, tensor-parallel shard) of a task.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from plans.errors import Fault, FaultKind, PlanMismatchError, SpecError
from plans.spec.cluster import Cluster
from plans.spec.job import Job, Mode
from plans.spec.llm import MOST
from plans.spec.model import SpecModel, fingerprint
from plans.workflow import RlTask, TaskKind, shape_of, workflow_of


class PipelineStage(SpecModel):
    """One pipeline stage of one replica."""

    layers: int = Field(ge=1)
    """Transformer layers on this stage."""
    gpus: tuple[str, ...] = Field(min_length=1)
    """GPU ids of the tensor-parallel shards, in rank order."""


class Replica(SpecModel):
    """One data-parallel replica of a task."""

    samples: int = Field(ge=1)
    """Samples per iteration that this replica handles."""
    micro_batch_size: int = Field(default=1, ge=1, le=MOST)
    """Samples per micro-batch."""
    decode_batch: int | None = Field(default=None, ge=1)
    """Sequences decoded together; generation only; absent = derived from free memory."""
    lengths: tuple[int, int] | None = None
    """Shortest and longest response, tokens, that this replica is meant for; generation only; absent = any."""
    stages: tuple[PipelineStage, ...] = Field(min_length=1)
    """Pipeline stages in order."""


class TaskPlan(SpecModel):
    """Parallel degrees and placement of one task."""

    dp: int = Field(ge=1)
    """Number of replicas."""
    pp: int = Field(ge=1)
    """Pipeline stages per replica (with `hetero_tp`: the largest number)."""
    tp: int = Field(ge=1)
    """Tensor-parallel shards per stage (with `hetero_tp`: the largest number)."""
    replicas: tuple[Replica, ...] = Field(min_length=1)
    """The replicas."""
    hetero_tp: bool = False
    """Whether shards per stage and stages per replica may differ."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """All GPU ids of the task: replica by replica, stage by stage, rank by rank."""
        return tuple(gpu for replica in self.replicas for stage in replica.stages for gpu in stage.gpus)


class TaskGroup(SpecModel):
    """Tasks that share a set of GPUs."""

    tasks: tuple[RlTask, ...] = Field(min_length=1)
    """Tasks co-located on the group's GPUs."""
    gpus: tuple[str, ...] = Field(min_length=1)
    """GPU ids of the group."""


class FanOut(SpecModel):
    """How the machines of a region read a new policy version from the region's store."""

    order: tuple[str, ...] = Field(min_length=1)
    """Machines, who needs it soonest first."""
    at_once: int = Field(ge=1)
    """Most machines that read at the same time: 1 is sequential, all of them a shared read."""
    read_s: float = Field(default=0.0, ge=0)
    """Predicted seconds of one machine's read."""


class SearchRecord(SpecModel):
    """How a plan was found."""

    model_config = SpecModel.model_config | {"extra": "allow"}

    evaluations: int = Field(default=0, ge=0)
    """Plans priced."""
    wall_s: float = Field(default=0.0, ge=0)
    """Seconds searched."""
    seed: int | None = None
    """Seed of the search."""
    optimal: bool | None = None
    """Whether the plan is proved optimal for `iteration_s`; None = no statement."""
    bound_s: float | None = None
    """Proved lower bound of `iteration_s`; None = none."""
    trace: tuple[tuple[float, int, float], ...] = ()
    """Incumbents as (wall_s, evaluations, best_iteration_s)."""
    status: str | None = None
    """What is known of the answer (methods with a proof)."""
    termination: str | None = None
    """Why the search stopped."""


class Plan(SpecModel):
    """A placement of every task of a job on the GPUs of a cluster."""

    format: Literal["motley.plan/1"] = "motley.plan/1"
    """Kind and version of the document."""
    method: str
    """Search method that made the plan."""
    cluster: str
    """Fingerprint of the cluster."""
    job: str
    """Fingerprint of the job."""
    groups: tuple[TaskGroup, ...] = Field(min_length=1)
    """Task grouping with the GPUs of each group."""
    tasks: dict[RlTask, TaskPlan]
    """Placement per task."""
    fan_out: dict[str, FanOut] = Field(default_factory=dict)
    """How new weights are read inside a region; a region that is not named reads shared, all machines at once."""
    predicted: dict[str, JsonValue] = Field(default_factory=dict)
    """What `motley cost` prints for the plan."""
    search: SearchRecord = SearchRecord()
    """How it was found; empty for a plan written by hand."""

    @model_validator(mode="after")
    def _tasks_in_order(self) -> Self:
        order = [task for task in RlTask if task in self.tasks]
        if list(self.tasks) != order:
            object.__setattr__(self, "tasks", {task: self.tasks[task] for task in order})
        return self

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the placement itself: groups and tasks, without method, prediction and search record."""
        document = self.to_document()
        return fingerprint({key: document[key] for key in ("format", "cluster", "job", "groups", "tasks")})

    def to_document(self) -> dict[str, JsonValue]:
        """Return the JSON-able document."""
        document: dict[str, JsonValue] = self.model_dump(mode="json", exclude={"search", "tasks"})
        document["tasks"] = {task.value: _task_document(plan) for task, plan in self.tasks.items()}
        document["search"] = _search_document(self.search)
        if not self.fan_out:
            del document["fan_out"]
        return document

    def to_json(self) -> str:
        """Return the document as JSON text with a trailing newline."""
        return json.dumps(self.to_document(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def check_plan(plan: Plan, cluster: Cluster, job: Job, *, source_name: str = "plan") -> None:
    """Refuse a plan that does not belong to, or does not fit the rules of, this cluster and job.

    Memory is not checked here: it is a matter of price and feasibility (`plans.memory`), not of form.

    Raises:
        PlanMismatchError: the plan carries the fingerprint of another cluster or job.
        SpecError: the plan breaks rules; all violations are listed.
    """
    for what, expected, found in (("cluster", cluster.fingerprint, plan.cluster), ("job", job.fingerprint, plan.job)):
        if expected != found:
            raise PlanMismatchError(source_name, what, expected=expected, found=found)
    faults = plan_faults(plan, cluster, job)
    if faults:
        raise SpecError(source_name, faults)


def plan_faults(plan: Plan, cluster: Cluster, job: Job) -> list[Fault]:
    """Return every rule that a plan breaks on this cluster and job, in document order."""
    return [
        *_task_set_faults(plan, job),
        *_group_faults(plan, cluster, job),
        *(fault for task in plan.tasks for fault in _task_faults(plan, cluster, job, task)),
        *_fan_out_faults(plan, cluster),
    ]


def _fan_out_faults(plan: Plan, cluster: Cluster) -> Iterator[Fault]:
    for region, fan_out in plan.fan_out.items():
        here = {machine.name for machine in cluster.machines if machine.region == region}
        strange = sorted(set(fan_out.order) - here)
        if strange or len(set(fan_out.order)) != len(fan_out.order):
            yield _conflict(
                f"fan_out.{region}.order",
                list(fan_out.order),
                f"it names machines of region {region}, each once",
                f"remove {', '.join(strange) or 'what is named twice'}",
            )


def _task_document(plan: TaskPlan) -> dict[str, JsonValue]:
    document: dict[str, JsonValue] = plan.model_dump(mode="json", exclude_none=True)
    if not plan.hetero_tp:
        del document["hetero_tp"]
    return document


def _search_document(search: SearchRecord) -> JsonValue:
    if search == SearchRecord():
        return {}
    absent = {key for key in ("status", "termination") if getattr(search, key) is None}
    return search.model_dump(mode="json", exclude=absent)


def _conflict(field: str, found: object, rule: str, remedy: str, kind: FaultKind = FaultKind.CONFLICT) -> Fault:
    return Fault(field=field, found=str(found), rule=rule, remedy=remedy, kind=kind)


def _task_set_faults(plan: Plan, job: Job) -> Iterator[Fault]:
    needed = workflow_of(job).tasks
    for task in needed:
        if task not in plan.tasks:
            yield _conflict(
                "tasks",
                f"without {task.value}",
                "every task of the job is placed",
                f"add tasks.{task.value}",
                FaultKind.MISSING,
            )
    for task in plan.tasks:
        if task not in needed:
            yield _conflict(f"tasks.{task.value}", "given", "the job has no such task", f"remove tasks.{task.value}")


def _group_faults(plan: Plan, cluster: Cluster, job: Job) -> Iterator[Fault]:
    task_home: dict[RlTask, int] = {}
    for index, group in enumerate(plan.groups):
        place = f"groups[{index}].tasks"
        for task in group.tasks:
            if task in task_home:
                yield _conflict(place, task.value, "a task belongs to exactly one group", "remove it from one of them")
            if task not in plan.tasks:
                yield _conflict(place, task.value, "a group names placed tasks only", "remove it or place the task")
            task_home[task] = index
        if job.mode is Mode.ASYNC and RlTask.ACTOR_GENERATION in group.tasks and len(group.tasks) > 1:
            yield _conflict(
                place,
                [t.value for t in group.tasks],
                "in async mode actor_generation shares no GPU with another task",
                "give actor_generation a group of its own",
            )
    yield from _group_gpu_faults(plan, cluster)
    yield from _membership_faults(plan, task_home, cluster)


def _group_gpu_faults(plan: Plan, cluster: Cluster) -> Iterator[Fault]:
    known = cluster.view.gpu_index
    seen: set[str] = set()
    for index, group in enumerate(plan.groups):
        place = f"groups[{index}].gpus"
        for gpu in group.gpus:
            if gpu not in known:
                yield _unknown_gpu(place, gpu)
            elif gpu in seen:
                yield _conflict(place, gpu, "a GPU is named once, in at most one group", "remove one of the two")
            seen.add(gpu)


def _membership_faults(plan: Plan, task_home: Mapping[RlTask, int], cluster: Cluster) -> Iterator[Fault]:
    known = cluster.view.gpu_index
    for task, task_plan in plan.tasks.items():
        if task not in task_home:
            missing = f"without {task.value}"
            yield _conflict(
                "groups", missing, "every placed task belongs to a group", "add it to a group", FaultKind.MISSING
            )
            continue
        members = set(plan.groups[task_home[task]].gpus)
        outside = sorted({gpu for gpu in task_plan.gpus if gpu not in members and gpu in known})
        if outside:
            yield _conflict(
                f"tasks.{task.value}",
                f"on {', '.join(outside)}",
                f"a task uses GPUs of its group only (groups[{task_home[task]}])",
                "add the GPUs to the group or move the tasklets",
            )


def _task_faults(plan: Plan, cluster: Cluster, job: Job, task: RlTask) -> Iterator[Fault]:
    task_plan = plan.tasks[task]
    place = f"tasks.{task.value}"
    yield from _gpu_use_faults(place, task_plan, cluster)
    yield from _degree_faults(place, task_plan)
    total = sum(replica.samples for replica in task_plan.replicas)
    if total != job.num_samples:
        yield _conflict(
            f"{place}.replicas",
            f"{total} samples in sum",
            f"the samples of a task add up to prompts x responses_per_prompt = {job.num_samples}",
            "correct the samples of its replicas",
        )
    if task in workflow_of(job).tasks:
        yield from _layer_faults(place, task_plan, shape_of(job, task).layers)
    for index, replica in enumerate(task_plan.replicas):
        if replica.decode_batch is not None and task.kind is not TaskKind.GENERATION:
            yield _conflict(
                f"{place}.replicas[{index}].decode_batch",
                replica.decode_batch,
                "only actor_generation decodes",
                "remove decode_batch",
            )
        if replica.lengths is not None and not (
            task.kind is TaskKind.GENERATION and 1 <= replica.lengths[0] <= replica.lengths[1]
        ):
            yield _conflict(
                f"{place}.replicas[{index}].lengths",
                list(replica.lengths),
                "only actor_generation has lengths, from 1 or more to no less than that",
                "correct or remove lengths",
            )
        if replica.decode_batch is not None and replica.decode_batch > job.generation.max_num_seqs:
            yield _conflict(
                f"{place}.replicas[{index}].decode_batch",
                replica.decode_batch,
                f"it is at most generation.max_num_seqs = {job.generation.max_num_seqs}",
                "lower decode_batch or raise max_num_seqs",
            )


def _gpu_use_faults(place: str, task_plan: TaskPlan, cluster: Cluster) -> Iterator[Fault]:
    known = cluster.view.gpu_index
    seen: set[str] = set()
    for i, replica in enumerate(task_plan.replicas):
        for j, stage in enumerate(replica.stages):
            for gpu in stage.gpus:
                where = f"{place}.replicas[{i}].stages[{j}].gpus"
                if gpu not in known:
                    yield _unknown_gpu(where, gpu)
                elif gpu in seen:
                    yield _conflict(where, gpu, "a GPU holds at most one tasklet of a task", "use another GPU")
                seen.add(gpu)


def _degree_faults(place: str, task_plan: TaskPlan) -> Iterator[Fault]:
    replicas = task_plan.replicas
    if task_plan.dp != len(replicas):
        yield _conflict(f"{place}.dp", task_plan.dp, f"dp is the number of replicas ({len(replicas)})", "correct dp")
    widths = [(i, j, len(s.gpus)) for i, r in enumerate(replicas) for j, s in enumerate(r.stages)]
    if task_plan.hetero_tp:
        pp, tp = max(len(r.stages) for r in replicas), max(width for _, _, width in widths)
        if (task_plan.pp, task_plan.tp) != (pp, tp):
            yield _conflict(
                f"{place}.pp",
                f"{task_plan.pp} with tp {task_plan.tp}",
                f"with hetero_tp they are the largest degrees ({pp} and {tp})",
                "correct pp and tp",
            )
        return
    for i, replica in enumerate(replicas):
        if len(replica.stages) != task_plan.pp:
            yield _conflict(
                f"{place}.replicas[{i}].stages",
                f"{len(replica.stages)} stages",
                f"every replica has pp = {task_plan.pp} stages",
                "correct pp or the stages, or set hetero_tp",
            )
    for i, j, width in widths:
        if width != task_plan.tp:
            yield _conflict(
                f"{place}.replicas[{i}].stages[{j}].gpus",
                f"{width} GPUs",
                f"every stage has tp = {task_plan.tp} GPUs",
                "correct tp or the GPUs, or set hetero_tp",
            )


def _layer_faults(place: str, task_plan: TaskPlan, layers: int) -> Iterator[Fault]:
    for i, replica in enumerate(task_plan.replicas):
        total = sum(stage.layers for stage in replica.stages)
        if total != layers:
            yield _conflict(
                f"{place}.replicas[{i}].stages",
                f"{total} layers in sum",
                f"the layers of a replica add up to the model's {layers}",
                "correct the layers of its stages",
            )


def _unknown_gpu(field: str, gpu: str) -> Fault:
    return _conflict(
        field, repr(gpu), "a GPU id is <machine>/<index> of this cluster", "use an existing GPU", FaultKind.UNKNOWN_NAME
    )
