"""What the engines of a deployment cannot execute, as a constraint of the search (extension).

The cost model prices any placement; an engine may run fewer: training that stays on one machine, replicas of one
device. A limit takes such placements out of the search space, so that a plan is never changed after it was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from plans.plan import Plan, TaskPlan
from plans.search.layouts import TaskLayout
from plans.spec.cluster import ClusterView
from plans.workflow import RlTask


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimit:
    """What one task's engine can run. The tensor shards of a stage always lie in one machine."""

    is_on_one_machine: bool = False
    """Whether all replicas of the task must be on the same machine."""
    most_pp: int | None = None
    """Most pipeline stages; None = any number."""
    most_tp: int | None = None
    """Most tensor shards, on GPU types that are not in `thread_types`; None = any number."""
    thread_types: frozenset[str] = frozenset()
    """GPU types whose tensor-parallel degree is a number of threads, which `most_tp` does not bound."""
    tp_divides: int | None = None
    """What tensor-parallel degrees divide (heads of a model); None = nothing."""
    has_equal_stages: bool = False
    """Whether all replicas cut the model at the same layers."""

    def allows_tp(self, tp: int, gpu_types: Iterable[str]) -> bool:
        """Whether a stage may have `tp` shards on GPUs of some types."""
        if self.tp_divides is not None and self.tp_divides % tp:
            return False
        is_bounded = self.most_tp is not None and tp > self.most_tp
        return not is_bounded or all(name in self.thread_types for name in gpu_types)

    def sentence(self) -> str:
        """Return the limit as a clause."""
        parts = ["stays on one machine"] if self.is_on_one_machine else ["keeps each stage on one machine"]
        if self.most_pp is not None:
            parts.append(f"pp <= {self.most_pp}")
        if self.most_tp is not None:
            parts.append(f"tp <= {self.most_tp}")
        if self.tp_divides is not None:
            parts.append(f"tp divides {self.tp_divides}")
        if self.has_equal_stages:
            parts.append("has the same layers per stage in every replica")
        return ", ".join(parts)

    def allows(self, layout: TaskLayout, machine_of: Callable[[int], int], type_of: Callable[[int], str]) -> bool:
        """Whether an engine can run a layout, by GPU index.

        Args:
            layout: degrees and GPUs.
            machine_of: machine index of a GPU.
            type_of: type name of a GPU.
        """
        machines = [machine_of(gpu) for gpu in layout.gpus]
        if self.is_on_one_machine and len(set(machines)) > 1:
            return False
        if self.most_pp is not None and layout.pp > self.most_pp:
            return False
        starts = range(0, len(machines), layout.tp)
        if any(len(set(machines[start : start + layout.tp])) > 1 for start in starts):
            return False
        return self.allows_tp(layout.tp, (type_of(gpu) for gpu in layout.gpus))

    def allows_stages(self, placed: TaskPlan) -> bool:
        """Whether an engine can run the layers per stage of a task's replicas."""
        layers = {tuple(stage.layers for stage in replica.stages) for replica in placed.replicas}
        return not self.has_equal_stages or len(layers) == 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits by task; a task without one may be placed anyhow."""

    tasks: Mapping[RlTask, TaskLimit] = field(default_factory=dict)
    """The limits."""
    together: frozenset[RlTask] = frozenset()
    """Tasks that must all be on one and the same machine; empty = none."""

    def __bool__(self) -> bool:
        """Whether anything is limited."""
        return bool(self.tasks)

    def of(self, task: RlTask) -> TaskLimit | None:
        """Return the limit of a task, None where there is none."""
        return self.tasks.get(task)

    def allows(self, task: RlTask, layout: TaskLayout, view: ClusterView) -> bool:
        """Whether a task's engine can run a layout."""
        limit = self.tasks.get(task)
        return limit is None or limit.allows(
            layout, lambda gpu: int(view.machine_of[gpu]), lambda gpu: view.type_names[int(view.type_of[gpu])]
        )

    def are_together(self, layouts: Mapping[RlTask, TaskLayout], view: ClusterView) -> bool:
        """Whether the tasks that must share a machine do."""
        machines = {int(view.machine_of[gpu]) for task in self.together for gpu in layouts[task].gpus}
        return len(machines) <= 1

    def faults(self, plan: Plan, view: ClusterView) -> list[str]:
        """Return what a plan asks of the engines that they can't do, one clause per task."""
        found = []
        layouts: dict[RlTask, TaskLayout] = {}
        for task, placed in plan.tasks.items():
            gpus = tuple(view.gpu_index[gpu] for r in placed.replicas for stage in r.stages for gpu in stage.gpus)
            limit = self.tasks.get(task)
            layout = layouts[task] = TaskLayout(placed.dp, placed.pp, placed.tp, gpus)
            if limit is not None and (
                placed.hetero_tp or not limit.allows_stages(placed) or not self.allows(task, layout, view)
            ):
                found.append(f"{task.value} {limit.sentence()}")
        if not self.are_together(layouts, view):
            found.append(self._together())
        return found

    def _together(self) -> str:
        return f"{' and '.join(sorted(task.value for task in self.together))} share a machine"

    def sentence(self) -> str:
        """Return all limits as text for a message."""
        each = [f"{task.value} {limit.sentence()}" for task, limit in self.tasks.items()]
        return "; ".join([*each, self._together()] if self.together else each)


NO_LIMITS = Limits()
"""Every placement may be planned."""
