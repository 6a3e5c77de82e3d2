"""Fit the coefficients of the calibrated model to measured task times (reconstruction).

A task's time is linear in the inverse efficiencies as long as the same stage decides it: T = sum_i x_i T_i + fixed,
with x = 1 / efficiency. The parts T_i come from the model itself, by a small change of each coefficient; the x are
then found by non-negative least squares on relative errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plans.cost.calibration import Calibration, ComputeEfficiency, GpuEfficiency, LinkEfficiency
from plans.cost.model import CostModel
from plans.cost.nnls import non_negative_least_squares
from plans.cost.price import price
from plans.errors import Fault, FaultKind, SpecError
from plans.plan import Plan
from plans.spec.cluster import Cluster
from plans.spec.job import Job
from plans.workflow import RlTask, TaskKind

#: Relative change of a coefficient from which its part of a task's time is read off.
PROBE = 1e-4
#: Weight of the built-in coefficients in a fit to a run, beside relative errors of its measurements: a coefficient that
#: is off by its own size costs as much as one measurement that is off by 2 %. One plan cannot tell bandwidth from
#: compute while it decodes; then both move by the same factor.
PRIOR_WEIGHT = 0.02
#: Fits of a run, each reading the model's parts around the one before.
ROUNDS = 3
#: What is fitted: ("compute", GPU type, task kind), ("hbm", GPU type, ""), ("links", "within"/"between", "").
Coefficient = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMeasurement:
    """One measured task time beside what the model says at data-sheet rates."""

    measured_s: float
    """Measured seconds, > 0."""
    parts_s: Mapping[Coefficient, float] = field(default_factory=dict)
    """Seconds at efficiency 1 that each coefficient scales."""
    fixed_s: float = 0.0
    """Seconds that no coefficient scales (latency, per-step overhead)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTime:
    """How long a task of a plan took in one iteration."""

    plan: Plan
    """The plan that ran."""
    task: RlTask
    """The task."""
    measured_s: float
    """Measured seconds, > 0."""


def fit_times(
    cluster: Cluster, job: Job, times: Sequence[TaskTime], *, name: str = "fitted"
) -> tuple[Calibration, tuple[float, ...]]:
    """Return the coefficients that explain the times of a run best, and the model's relative errors with them.

    Fits, reads the model's parts again around the fit, where another stage may decide a task's time, and fits again.
    Coefficients that the times don't determine stay near their built-in values (`PRIOR_WEIGHT`).

    Args:
        cluster: the cluster measured on.
        job: the job measured.
        times: task times of one or more plans.
        name: name of the coefficients.

    Raises:
        SpecError: no time, one that is not a positive finite number, or a plan that has no finite price.
    """
    fitted = Calibration()
    for _ in range(ROUNDS):
        measurements = [
            measurement_of(cluster, job, time.plan, time.task, time.measured_s, around=fitted) for time in times
        ]
        fitted = fit_calibration(measurements, name=name, prior_weight=PRIOR_WEIGHT)
    return fitted, errors_of(cluster, job, times, fitted)


def errors_of(cluster: Cluster, job: Job, times: Sequence[TaskTime], calibration: Calibration) -> tuple[float, ...]:
    """Return (modelled - measured) / measured of each time under coefficients."""
    return tuple(_seconds(cluster, job, t.plan, t.task, calibration) / t.measured_s - 1.0 for t in times)


def measurement_of(
    cluster: Cluster, job: Job, plan: Plan, task: RlTask, measured_s: float, *, around: Calibration | None = None
) -> TaskMeasurement:
    """Return a measurement of one task of a plan, with the model's parts at efficiency 1.

    Args:
        cluster: the cluster measured on.
        job: the job measured.
        plan: the plan that ran.
        task: the task measured.
        measured_s: its seconds per iteration.
        around: coefficients near which the parts are read; absent = the built-in ones. Fit, then read the parts
            again around the fit, when the deciding stage may have changed.
    """
    base = around if around is not None else Calibration()
    types = sorted({m.gpu for m in cluster.machines})
    # Every type of the cluster gets its own entry, so that one can be changed alone.
    base = base.model_copy(update={"gpu_types": {name: base.of(name) for name in types}})
    total = _seconds(cluster, job, plan, task, base)
    coefficients: list[Coefficient] = [("compute", name, task.kind.value) for name in types]
    coefficients += [("hbm", name, "") for name in types] + [("links", "within", ""), ("links", "between", "")]
    parts, explained = {}, 0.0
    for coefficient in coefficients:
        slower = _with_inverse_scaled(base, coefficient, 1.0 + PROBE)
        share_s = (_seconds(cluster, job, plan, task, slower) - total) / PROBE
        if share_s > 1e-9 * total:
            parts[coefficient] = share_s * _efficiency(base, coefficient)
            explained += share_s
    return TaskMeasurement(measured_s=measured_s, parts_s=parts, fixed_s=max(0.0, total - explained))


def fit_calibration(
    measurements: Sequence[TaskMeasurement], *, name: str = "fitted", prior_weight: float = 0.0
) -> Calibration:
    """Return the coefficients that explain the measured times best.

    Coefficients that no measurement touches, or that the data cannot tell from zero time, keep their built-in
    values. An efficiency above 1 means that the stated rate of the GPU type or link is too low.

    Args:
        measurements: what was measured.
        name: name of the coefficients.
        prior_weight: weight (>= 0) of a coefficient's relative distance from its built-in value, beside the relative
            errors of the measurements.

    Raises:
        SpecError: no measurement, or a time that is not a positive finite number.
    """
    _check(measurements)
    columns = sorted({coefficient for m in measurements for coefficient in m.parts_s})
    matrix = np.array([[m.parts_s.get(c, 0.0) / m.measured_s for c in columns] for m in measurements])
    target = np.array([1.0 - m.fixed_s / m.measured_s for m in measurements])
    if prior_weight > 0.0:
        built_in = Calibration()
        matrix = np.vstack([matrix, np.diag([prior_weight * _efficiency(built_in, c) for c in columns])])
        target = np.append(target, np.full(len(columns), prior_weight))
    slowdowns = non_negative_least_squares(matrix, target) if columns else np.zeros(0)
    found = {c: 1.0 / float(x) for c, x in zip(columns, slowdowns, strict=True) if x > 0.0}
    return _calibration_of(found, name)


def relative_errors(measurements: Sequence[TaskMeasurement], calibration: Calibration) -> tuple[float, ...]:
    """Return (modelled - measured) / measured of each measurement under coefficients."""
    errors = []
    for m in measurements:
        modelled = m.fixed_s + sum(part / _efficiency(calibration, c) for c, part in m.parts_s.items())
        errors.append(modelled / m.measured_s - 1.0)
    return tuple(errors)


def _check(measurements: Sequence[TaskMeasurement]) -> None:
    faults = [
        Fault(field=f"measurements[{i}].measured_s", found=str(m.measured_s), kind=FaultKind.OUT_OF_RANGE,
              rule="it is a positive finite number", remedy="measure again or leave it out")
        for i, m in enumerate(measurements) if not (np.isfinite(m.measured_s) and m.measured_s > 0)
    ]  # fmt: skip
    if not measurements:
        faults = [Fault(field="measurements", found="empty", kind=FaultKind.MISSING,
                        rule="a fit needs at least one", remedy="measure at least one task")]  # fmt: skip
    if faults:
        raise SpecError("measurements", faults)


def _seconds(cluster: Cluster, job: Job, plan: Plan, task: RlTask, calibration: Calibration) -> float:
    report = price(cluster, job, plan, CostModel.calibrated(calibration)).tasks[task]
    if report is None:
        raise SpecError(plan.method, [Fault(
            field=f"tasks.{task.value}", found="over a forbidden link", rule="a measured task has a finite price",
            remedy="give the plan that really ran", kind=FaultKind.CONFLICT)])  # fmt: skip
    return report.total_s


def _efficiency(calibration: Calibration, coefficient: Coefficient) -> float:
    what, name, kind = coefficient
    if what == "links":
        links = calibration.links
        return links.within_machine if name == "within" else links.between_machines
    of_type = calibration.of(name)
    return of_type.compute.of(TaskKind(kind)) if what == "compute" else of_type.hbm


def _with_inverse_scaled(calibration: Calibration, coefficient: Coefficient, factor: float) -> Calibration:
    return _with(calibration, coefficient, _efficiency(calibration, coefficient) / factor)


def _with(calibration: Calibration, coefficient: Coefficient, value: float) -> Calibration:
    """Return the coefficients with one of them set."""
    what, name, kind = coefficient
    if what == "links":
        key = "within_machine" if name == "within" else "between_machines"
        links = LinkEfficiency(**{**calibration.links.model_dump(), key: value})
        return calibration.model_copy(update={"links": links})
    of_type = calibration.of(name)
    if what == "compute":
        compute = ComputeEfficiency(**{**of_type.compute.model_dump(), kind: value})
        changed = of_type.model_copy(update={"compute": compute})
    else:
        changed = GpuEfficiency(**{**of_type.model_dump(), "hbm": value})
    return calibration.model_copy(update={"gpu_types": {**calibration.gpu_types, name: changed}})


def _calibration_of(found: Mapping[Coefficient, float], name: str) -> Calibration:
    calibration = Calibration(name=name)
    for coefficient, value in sorted(found.items()):
        calibration = _with(calibration, coefficient, value)
    return calibration
