"""What the engines of a job cannot execute, as limits for the planner (`plans.search.limits`).

A placement that the planner may return is one that stages and engines can run as it stands: nothing changes a plan
afterwards. When an engine learns more, its line here changes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from plans.search.limits import Limits, TaskLimit
from plans.spec.cluster import Cluster
from plans.spec.llm import LlmShape
from plans.workflow import RlTask, TaskKind, shape_of, workflow_of
from stages.single_machine_plan import CPU
from stages.spec.job import TrainingJob

#: On cpu devices a tensor-parallel degree is a number of threads (docs/adr/0004).
_THREADS: Final = frozenset({CPU})

_ONE_DEVICE: Final = TaskLimit(most_pp=1, most_tp=1, thread_types=_THREADS)
"""transformers: one GPU per replica."""

_TRAINING: Final = TaskLimit(is_on_one_machine=True, most_pp=1, most_tp=1, thread_types=_THREADS)
"""accelerate: data parallel processes."""


def _megatron(shape: LlmShape) -> TaskLimit:
    """Return what megatron-core can run: a process per device, on cpu devices too (docs/adr/0013)."""
    return TaskLimit(
        is_on_one_machine=True,
        tp_divides=math.gcd(shape.heads, shape.kv_heads, shape.intermediate),
        has_equal_stages=True,
    )


_GENERATION: Final = {"transformers": _ONE_DEVICE, "vllm": TaskLimit(most_pp=1, thread_types=_THREADS)}
"""By generation engine; vLLM shards a replica over the GPUs of a machine."""


def machines_without_address(cluster: Cluster) -> list[str]:
    """Return the machines whose absence of an address keeps training on one machine (docs/adr/0018)."""
    return [machine.name for machine in cluster.machines if machine.address is None]


def engine_limits(job: TrainingJob, cluster: Cluster) -> Limits:
    """Return the limits of every task of a job on a cluster.

    The policy's training spreads over machines where each can reach the others; that of adapters, which is seen to work
    on one machine only, does not.
    """
    by_kind = {
        TaskKind.GENERATION: _GENERATION[job.engines.generation.name],
        TaskKind.TRAINING: _TRAINING,
        TaskKind.INFERENCE: _ONE_DEVICE,
    }
    by_task: dict[RlTask, TaskLimit] = {}
    if job.engines.training.name == "megatron":
        # The critic is trained by accelerate.
        by_task[RlTask.ACTOR_TRAINING] = _megatron(shape_of(job.planner, RlTask.ACTOR_TRAINING))
    tasks = workflow_of(job.planner).tasks
    # The first critic is made from the first policy, by one stage on one machine.
    training = frozenset(task for task in tasks if task.kind is TaskKind.TRAINING)
    limits = {task: by_task.get(task, by_kind[task.kind]) for task in tasks}
    is_whole = job.engines.training.lora is None
    if len(training) == 1 and is_whole and not machines_without_address(cluster):
        alone = limits[RlTask.ACTOR_TRAINING]
        limits[RlTask.ACTOR_TRAINING] = replace(alone, is_on_one_machine=False)
    return Limits(limits, together=training if len(training) > 1 else frozenset())
