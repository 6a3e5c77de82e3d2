"""Fitting coefficients."""

from __future__ import annotations

import numpy as np
import pytest

from plans.cost import CompactPlan, CompactTask, CostModel, plan_of, price
from plans.cost.calibration import Calibration, ComputeEfficiency, GpuEfficiency, LinkEfficiency
from plans.cost.fit import (
    TaskMeasurement,
    TaskTime,
    errors_of,
    fit_calibration,
    fit_times,
    measurement_of,
    relative_errors,
)
from plans.cost.nnls import non_negative_least_squares
from plans.errors import SpecError
from plans.workflow import workflow_of
from tests.helpers.planner_cases import paper_cluster, paper_job

TRUTH = Calibration(
    name="fitted",
    gpu_types={
        "A100-40": GpuEfficiency(compute=ComputeEfficiency(generation=0.3, inference=0.61, training=0.37), hbm=0.8),
        "L4": GpuEfficiency(compute=ComputeEfficiency(generation=0.5, inference=0.4, training=0.55), hbm=0.7),
    },
    links=LinkEfficiency(within_machine=0.5),
)


def measure() -> list[TaskMeasurement]:
    cluster, job = paper_cluster([("A100-40", "va", 8), ("L4", "oh", 8)]), paper_job("qwen3-1.7b", algorithm="grpo")
    tasks = workflow_of(job).tasks
    grids = [np.arange(8).reshape(4, 1, 2), np.arange(8).reshape(1, 1, 8), np.arange(8, 16).reshape(8, 1, 1),
             np.arange(8, 16).reshape(2, 2, 2)]  # fmt: skip
    measurements = []
    for grid in grids:
        dp, pp, _ = grid.shape
        placement = CompactTask(grid, (28 // pp,) * pp, (3072 // dp,) * dp)
        plan = plan_of(CompactPlan((tasks,), dict.fromkeys(tasks, placement)), cluster, job, method="hand")
        report = price(cluster, job, plan, CostModel.calibrated(TRUTH))
        for task in tasks:
            measured = report.tasks[task]
            assert measured is not None
            measurements.append(measurement_of(cluster, job, plan, task, measured.total_s))
    return measurements


def test_fit_recovers_the_coefficients_that_made_the_times() -> None:
    measurements = measure()
    fitted = fit_calibration(measurements)
    assert relative_errors(measurements, fitted) == pytest.approx([0.0] * len(measurements), abs=1e-6)
    for name, expected in TRUTH.gpu_types.items():
        assert fitted.of(name).hbm == pytest.approx(expected.hbm)
        assert fitted.of(name).compute.model_dump() == pytest.approx(expected.compute.model_dump(), rel=1e-6)
    assert fitted.links.within_machine == pytest.approx(0.5)


def test_run_whose_plan_cannot_tell_coefficients_apart_is_explained_by_all_of_them() -> None:
    """One plan, one task: whatever part of its time bandwidth and compute have, both get the same factor."""
    cluster, job = paper_cluster([("A100-40", "va", 8)]), paper_job("qwen3-1.7b", algorithm="grpo")
    tasks = workflow_of(job).tasks
    placement = CompactTask(np.arange(8).reshape(8, 1, 1), (28,), (384,) * 8)
    plan = plan_of(CompactPlan((tasks,), dict.fromkeys(tasks, placement)), cluster, job, method="hand")
    modelled = price(cluster, job, plan, CostModel.calibrated()).tasks
    times = [
        TaskTime(plan=plan, task=task, measured_s=2.0 * cost.total_s) for task in tasks if (cost := modelled[task])
    ]

    fitted, errors = fit_times(cluster, job, times, name="run")

    assert errors_of(cluster, job, times, Calibration()) == pytest.approx([-0.5] * len(times))
    assert errors == pytest.approx([0.0] * len(times), abs=0.01)
    before, after = GpuEfficiency(), fitted.of("A100-40")
    assert 0.3 * before.hbm < after.hbm < 0.7 * before.hbm
    assert 0.3 * before.compute.training < after.compute.training < 0.7 * before.compute.training
    assert fitted.name == "run"


def test_coefficients_without_measurements_keep_their_defaults() -> None:
    only = TaskMeasurement(measured_s=2.0, parts_s={("compute", "L4", "training"): 1.0})
    fitted = fit_calibration([only])
    assert fitted.of("L4").compute == ComputeEfficiency(training=0.5)
    assert fitted.of("H100") == GpuEfficiency()


def test_bad_measurements_are_refused_together() -> None:
    with pytest.raises(SpecError, match=r"measurements\[0\].measured_s is nan") as caught:
        fit_calibration([TaskMeasurement(measured_s=float("nan")), TaskMeasurement(measured_s=-1.0)])
    assert [fault.field for fault in caught.value.faults] == [
        "measurements[0].measured_s",
        "measurements[1].measured_s",
    ]
    with pytest.raises(SpecError, match="measurements is empty"):
        fit_calibration([])


@pytest.mark.parametrize("seed", range(30))
def test_nnls_satisfies_the_optimality_conditions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, 5)), rng.normal(size=12)
    x = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert gradient[x == 0].max(initial=-1.0) <= 1e-9
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= 1e-9
