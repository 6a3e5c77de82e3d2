"""What a plan says of a training engine, in the engine's own options."""

from __future__ import annotations

from typing import Final

from pydantic import JsonValue

from plans.plan import TaskPlan
from stages.spec.job import TrainingJob

CRITIC_ENGINE: Final = "accelerate"
"""The engine that trains critics, whatever trains the policy."""
SPLITTING_ENGINES: Final = frozenset({"megatron"})
"""Training engines that run tensor and pipeline parallel plans, one process per device."""


def trainer_options(job: TrainingJob, engine: str, placed: TaskPlan, *, num_processes: int) -> dict[str, JsonValue]:
    """Return the options of a training engine.

    Args:
        job: The job; its own options of the engine come first.
        engine: Engine by name.
        placed: Placement of the task.
        num_processes: Data-parallel processes, for engines that don't split the model.
    """
    training = job.planner.training
    own = job.engines.training.options if engine == job.engines.training.name else {}
    options: dict[str, JsonValue] = {
        **own, "precision": training.precision.value, "recompute": training.recompute.value, "seed": job.seed,
    }  # fmt: skip
    if engine not in SPLITTING_ENGINES:
        return {**options, "num_processes": num_processes}
    return {
        **options,
        "tensor_parallel": placed.tp,
        "stage_layers": [stage.layers for stage in placed.replicas[0].stages],
        "replica_samples": [replica.samples for replica in placed.replicas],
    }
