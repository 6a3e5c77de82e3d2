"""The cost model: price a plan, fast evaluation for searches, calibration."""

from plans.cost.calibration import Calibration, load_calibration
from plans.cost.compact import CompactPlan, CompactTask, compact_of, plan_of
from plans.cost.evaluator import Evaluation, PlanEvaluator
from plans.cost.fit import TaskMeasurement, TaskTime, errors_of, fit_calibration, fit_times, measurement_of
from plans.cost.model import CostMode, CostModel, Fanout
from plans.cost.price import price
from plans.cost.report import CostReport

__all__ = [
    "Calibration",
    "CompactPlan",
    "CompactTask",
    "CostMode",
    "CostModel",
    "CostReport",
    "Evaluation",
    "Fanout",
    "PlanEvaluator",
    "TaskMeasurement",
    "TaskTime",
    "compact_of",
    "errors_of",
    "fit_calibration",
    "fit_times",
    "load_calibration",
    "measurement_of",
    "plan_of",
    "price",
]
