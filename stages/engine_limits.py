"""What the engines of a job cannot execute, as limits for the planner (`plans.search.limits`).

A placement that the planner may return is one that stages and engines can run as it stands: nothing changes a plan
afterwards. When an engine learns more, its line here changes.
"""

from __future__ import annotations

from typing import Final

from plans.search.limits import Limits, TaskLimit
from plans.workflow import TaskKind, workflow_of
from stages.single_machine_plan import CPU
from stages.spec.job import TrainingJob

#: On cpu devices a tensor-parallel degree is a number of threads (docs/adr/0004).
_THREADS: Final = frozenset({CPU})

_ONE_DEVICE: Final = TaskLimit(most_pp=1, most_tp=1, thread_types=_THREADS)
"""transformers: one GPU per replica."""

_TRAINING: Final = TaskLimit(is_on_one_machine=True, most_pp=1, most_tp=1, thread_types=_THREADS)
"""accelerate: processes of one machine, data parallel."""

_GENERATION: Final = {"transformers": _ONE_DEVICE, "vllm": TaskLimit(most_pp=1, thread_types=_THREADS)}
"""By generation engine; vLLM shards a replica over the GPUs of a machine."""


def engine_limits(job: TrainingJob) -> Limits:
    """Return the limits of every task of a job."""
    by_kind = {
        TaskKind.GENERATION: _GENERATION[job.engines.generation.name],
        TaskKind.TRAINING: _TRAINING,
        TaskKind.INFERENCE: _ONE_DEVICE,
    }
    tasks = workflow_of(job.planner).tasks
    # The first critic is made from the first policy, by one stage on one machine.
    training = frozenset(task for task in tasks if task.kind is TaskKind.TRAINING)
    return Limits({task: by_kind[task.kind] for task in tasks}, together=training if len(training) > 1 else frozenset())
