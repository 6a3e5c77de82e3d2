"""From measured profiles to the coefficients of the calibrated cost model.

An efficiency is achieved over stated rate. What a task achieves of the rate that the machine really has is built in
(`plans.cost.calibration`); a profile says what the machine really has. So each coefficient of a GPU type is its
built-in value times measured over stated rate, the mean over the machines of the type that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from plans.cost.calibration import Calibration, ComputeEfficiency, GpuEfficiency
from plans.cost.model import CostModel
from plans.spec.cluster import Cluster, Machine
from plans.spec.job import Job, Precision
from stages.single_machine_plan import CPU

Profiles = Mapping[str, Mapping[str, Any]]
"""Profile documents by machine name."""


def model_of(cluster: Cluster, job: Job, profiles: Profiles) -> CostModel:
    """Return the calibrated model with the rates that were measured; the built-in one without a profile."""
    return CostModel.calibrated(calibration_of(cluster, job, profiles))


def calibration_of(cluster: Cluster, job: Job, profiles: Profiles) -> Calibration:
    """Return the coefficients of a cluster whose machines were measured (some or all of them)."""
    measured: dict[str, list[tuple[float, float]]] = {}
    names = []
    for machine in cluster.machines:
        profile = profiles.get(machine.name)
        if profile is not None:
            names.append(machine.name)
            measured.setdefault(machine.gpu, []).append(_ratios(cluster, job, machine, profile))
    if not names:
        return Calibration()
    types = {
        gpu: _efficiency(fmean(c for c, _ in found), fmean(m for _, m in found)) for gpu, found in measured.items()
    }
    return Calibration(name=f"profiles of {', '.join(names)}", gpu_types=types)


def _ratios(cluster: Cluster, job: Job, machine: Machine, profile: Mapping[str, Any]) -> tuple[float, float]:
    """Return measured over stated rate of computing and of memory, per device."""
    stated = cluster.gpu_type(machine.gpu)
    rates = profile["flop_per_s"]
    wanted = "fp32" if job.training.precision is Precision.FP32 else "bf16"
    # A profile of a cpu is of all its devices (threads) together, one of a GPU is of one.
    devices = machine.count if machine.gpu == CPU else 1
    compute = rates.get(wanted, rates["fp32"]) / devices / stated.compute_flop_per_s
    return compute, profile["memory_bytes_per_s"] / devices / stated.hbm_bytes_per_s


def _efficiency(compute: float, memory: float) -> GpuEfficiency:
    base = GpuEfficiency()
    shares = {name: value * compute for name, value in base.compute.model_dump().items()}
    return base.model_copy(update={"compute": ComputeEfficiency(**shares), "hbm": base.hbm * memory})
