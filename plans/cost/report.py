"""The price of a plan: the document that `motley cost --json` prints."""

from __future__ import annotations

import json

from pydantic import Field, JsonValue

from plans.spec.model import SpecModel
from plans.workflow import RlTask


class PhaseReport(SpecModel):
    """Seconds of the phases."""

    generation_s: float
    """Actor generation."""
    inference_s: float
    """Phi of the inference tasks."""
    training_s: float
    """Phi of the training tasks."""
    transfer_s: float
    """Re-sharding (sync) or weight sync (async); part of `iteration_s`."""


class TaskReport(SpecModel):
    """Seconds of one task; the components are maxima of their own and need not add up to `total_s`."""

    total_s: float
    """The task's cost by the model's own aggregation."""
    comp_s: float
    """Compute."""
    hbm_s: float
    """Decoding."""
    tp_s: float
    """Tensor-parallel all-reduces."""
    pp_s: float
    """Pipeline transfers."""
    dp_s: float
    """Gradient all-reduce."""
    bubble_s: float
    """Pipeline fill."""


class GpuMemory(SpecModel):
    """Memory of one GPU."""

    model_gb: float
    """Resident models."""
    working_gb: float
    """Largest working set of a task, the key/value cache included."""
    capacity_gb: float
    """Memory of the GPU."""


class Bottleneck(SpecModel):
    """Where a task's time is decided."""

    replica: int
    """Replica index."""
    stage: int
    """Pipeline stage index."""
    gpus: tuple[str, ...]
    """GPU ids of the stage."""


class CostReport(SpecModel):
    """Everything that a price says. Times are None only when `feasible` is false and a needed link is forbidden."""

    iteration_s: float | None
    """Seconds per RL iteration."""
    throughput_samples_s: float
    """Completions per second."""
    throughput_tokens_s: float
    """Prompt and response tokens per second."""
    usd_per_hour: float
    """Price of the GPUs that hold a tasklet."""
    usd_per_million_tokens: float | None
    """Price per million prompt and response tokens."""
    phases: PhaseReport | None
    """Seconds of the phases."""
    tasks: dict[RlTask, TaskReport | None]
    """Seconds per task."""
    memory: dict[str, GpuMemory]
    """Memory of each GPU that holds a tasklet."""
    feasible: bool
    """Whether every GPU's memory and every link allow the plan."""
    violations: tuple[str, ...]
    """What is not allowed, one sentence each."""
    model: str
    """Cost model: paper or calibrated."""
    bottlenecks: dict[RlTask, Bottleneck] = Field(default_factory=dict)
    """Deciding replica and stage per task."""
    decode_batches: tuple[int, ...] = ()
    """Decode batch per replica of actor_generation, as given or derived from free memory."""

    free_overlap_s: float | None = None
    """Seconds per iteration if tasks of a phase that share no GPU overlapped; None over a forbidden link."""
    rings_proved: bool = True
    """Whether the order of every ring is proved best; otherwise a ring may be faster than priced, never slower."""

    def to_document(self) -> dict[str, JsonValue]:
        """Return the JSON-able document."""
        document: dict[str, JsonValue] = self.model_dump(mode="json")
        return document

    def to_json(self) -> str:
        """Return the document as JSON text with a trailing newline."""
        return json.dumps(self.to_document(), indent=1, allow_nan=False) + "\n"
