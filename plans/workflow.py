"""The RL workflow: which tasks an iteration has, what each is, and what depends on what (HetRL section 2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plans.spec.job import Algorithm, Job, Mode, ModelSpec, VerifierSpec
from plans.spec.llm import LlmShape


class TaskKind(StrEnum):
    """What a task does with its model."""

    GENERATION = "generation"
    INFERENCE = "inference"
    TRAINING = "training"


class RlTask(StrEnum):
    """A task of the workflow graph, in the order in which documents list them."""

    ACTOR_GENERATION = "actor_generation"
    REWARD_INFERENCE = "reward_inference"
    REFERENCE_INFERENCE = "reference_inference"
    CRITIC_INFERENCE = "critic_inference"
    ACTOR_TRAINING = "actor_training"
    CRITIC_TRAINING = "critic_training"

    @property
    def kind(self) -> TaskKind:
        """Generation, inference or training."""
        return _KINDS[self]

    @property
    def role(self) -> str:
        """The model's role: actor, critic, reference or reward."""
        return _ROLES[self]

    @property
    def has_scalar_head(self) -> bool:
        """Whether the model ends in a scalar head (critic, reward model) instead of the vocabulary."""
        return self.role in {"critic", "reward"}


# Read for every plan that a search prices, so worked out once.
_KINDS = {task: TaskKind(task.value.rpartition("_")[2]) for task in RlTask}
_ROLES = {task: task.value.partition("_")[0] for task in RlTask}
_PPO_ONLY = frozenset({RlTask.CRITIC_INFERENCE, RlTask.CRITIC_TRAINING})


@dataclass(frozen=True, slots=True)
class Workflow:
    """The tasks of one iteration and their order."""

    tasks: tuple[RlTask, ...]
    """Tasks that need GPUs, in `RlTask` order."""
    mode: Mode
    """Sync: phases follow each other. Async: generation overlaps the rest."""

    def of_kind(self, kind: TaskKind) -> tuple[RlTask, ...]:
        """Return the tasks of one kind."""
        return tuple(task for task in self.tasks if task.kind is kind)

    @property
    def edges(self) -> tuple[tuple[RlTask, RlTask], ...]:
        """Precedence inside an iteration: generation -> every inference task -> every training task.

        In async mode the same edges hold between the data of an iteration; its phases overlap across iterations.
        """
        inference, training = self.of_kind(TaskKind.INFERENCE), self.of_kind(TaskKind.TRAINING)
        first = tuple((RlTask.ACTOR_GENERATION, task) for task in inference or training)
        return first + tuple((a, b) for a in inference for b in training)


def workflow_of(job: Job) -> Workflow:
    """Return the workflow of a job: six tasks for PPO, four for GRPO, one fewer with a rule as reward."""
    skipped = set() if job.algorithm is Algorithm.PPO else set(_PPO_ONLY)
    if isinstance(job.models.reward, VerifierSpec):
        skipped.add(RlTask.REWARD_INFERENCE)
    return Workflow(tasks=tuple(task for task in RlTask if task not in skipped), mode=job.mode)


def shape_of(job: Job, task: RlTask) -> LlmShape:
    """Return the shape of the model that a task runs; raises KeyError for a task the job does not have."""
    model = getattr(job.models, task.role)
    if not isinstance(model, ModelSpec):
        raise KeyError(f"the job has no model for {task.value}")
    return model.llm
