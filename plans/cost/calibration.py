"""Coefficients of the calibrated cost model: the document `motley.calibration/1`, its defaults and its loader.

A coefficient is an efficiency: achieved rate over stated rate, above 1 only where the stated rate is too low. The
built-in values are our own estimates of well-tuned engines (hetrl.md 4.8, reconstruction) until a file fitted from
measurements is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from plans.errors import Fault
from plans.spec.cluster_rules import unknown_type_fault
from plans.spec.load import build, load_text
from plans.spec.model import SpecModel
from plans.workflow import TaskKind

#: Achieved share of peak FLOP/s, by task kind. Training: reported MFU of tuned dense models on A100-class chips.
DEFAULT_COMPUTE = {TaskKind.GENERATION: 0.45, TaskKind.INFERENCE: 0.50, TaskKind.TRAINING: 0.42}
#: Achieved share of HBM bandwidth while decoding.
DEFAULT_HBM = 0.65


class ComputeEfficiency(SpecModel):
    """Share of peak FLOP/s that a GPU type achieves, by kind of task."""

    generation: float = Field(default=DEFAULT_COMPUTE[TaskKind.GENERATION], gt=0)
    """Prefill and decode of the serving engine."""
    inference: float = Field(default=DEFAULT_COMPUTE[TaskKind.INFERENCE], gt=0)
    """Forward passes."""
    training: float = Field(default=DEFAULT_COMPUTE[TaskKind.TRAINING], gt=0)
    """Forward and backward passes."""

    def of(self, kind: TaskKind) -> float:
        """Return the efficiency of a task kind."""
        return {
            TaskKind.GENERATION: self.generation,
            TaskKind.INFERENCE: self.inference,
            TaskKind.TRAINING: self.training,
        }[kind]


class GpuEfficiency(SpecModel):
    """Coefficients of one GPU type."""

    compute: ComputeEfficiency = ComputeEfficiency()
    """Share of peak FLOP/s."""
    hbm: float = Field(default=DEFAULT_HBM, gt=0)
    """Share of HBM bandwidth while decoding."""
    decode_layer_overhead_s: float = Field(default=5e-6, ge=0)
    """Seconds per layer and decode step that are not bandwidth (kernel launches, sampling share)."""


class LinkEfficiency(SpecModel):
    """Achieved share of link bandwidth."""

    within_machine: float = Field(default=0.70, gt=0)
    """Links inside a machine."""
    between_machines: float = Field(default=0.80, gt=0)
    """Links between machines."""


class Calibration(SpecModel):
    """All coefficients of the calibrated model."""

    format: Literal["motley.calibration/1"] = "motley.calibration/1"
    """Kind and version of the document."""
    name: str = "built-in"
    """Name for people."""
    default: GpuEfficiency = GpuEfficiency()
    """Coefficients of every type that `gpu_types` does not name."""
    gpu_types: dict[str, GpuEfficiency] = Field(default_factory=dict)
    """Coefficients by GPU type."""
    links: LinkEfficiency = LinkEfficiency()
    """Coefficients of links."""
    sync_factor: float = Field(default=1.0, gt=0)
    """Multiplier of weight transfers (kappa_sync of hetrl.md 4.6)."""
    tail: float | None = Field(default=None, gt=0, lt=1)
    """Share of batches whose longest response is no longer than what generation is charged, 0.95 for the p95 of the
    batch; absent = the expected longest response."""

    def of(self, gpu_type: str) -> GpuEfficiency:
        """Return the coefficients of a GPU type."""
        return self.gpu_types.get(gpu_type, self.default)


def load_calibration(text: str, source_name: str, types: Sequence[str] | None = None) -> Calibration:
    """Return the coefficients of a JSON or YAML text.

    Args:
        text: JSON or YAML.
        source_name: the name that messages use.
        types: GPU types that exist; absent = any may be named.

    Raises:
        SpecError: with every fault.
    """

    def faults(calibration: Calibration) -> list[Fault]:
        unknown = [name for name in calibration.gpu_types if types is not None and name not in types]
        return [unknown_type_fault(f"gpu_types.{name}", name, types or (), "remove the entry") for name in unknown]

    return load_text(text, source_name, lambda document, name: build(Calibration, document, name, faults))
