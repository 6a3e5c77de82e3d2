"""Which machine has which ranks of a training task: the order is the plan's, whatever order machines start in."""

from __future__ import annotations

from dataclasses import dataclass

from plans.plan import TaskPlan
from stages.training_launch import SPLITTING_ENGINES


@dataclass(frozen=True, slots=True)
class GangLayout:
    """The machines of a training task and their ranks."""

    machines: tuple[str, ...]
    """In the order in which the plan first names them; the first one leads."""
    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each machine, ascending."""
    devices: tuple[tuple[str, ...], ...]
    """Devices of each machine in the order of its ranks."""

    @property
    def lead(self) -> str:
        """The machine that has rank 0: it hosts the ranks' store, and it alone publishes."""
        return self.machines[0]

    def devices_of(self, machine: str) -> tuple[str, ...]:
        """Return the devices of a machine in the order of its ranks."""
        return self.devices[self.machines.index(machine)]


def has_several_machines(task: TaskPlan) -> bool:
    """Whether a plan spreads a task over machines."""
    return len({device.rpartition("/")[0] for device in task.gpus}) > 1


def gang_layout(task: TaskPlan, engine: str) -> GangLayout:
    """Return who has which rank.

    Rank r has the r-th device that the plan lists (megatron), or the first device of the r-th replica (accelerate,
    whose further devices of a replica are threads of the same process on CPU).

    Args:
        task: Placement of the task.
        engine: Training engine by name.

    Example:
        Devices a/0, b/0, a/1: machine a has ranks (0, 2), machine b has (1,).
    """
    owners = task.gpus if engine in SPLITTING_ENGINES else [replica.stages[0].gpus[0] for replica in task.replicas]
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(owners):
        ranks.setdefault(device.rpartition("/")[0], []).append(rank)
    return GangLayout(
        machines=tuple(ranks),
        ranks=tuple(tuple(each) for each in ranks.values()),
        devices=tuple(tuple(owners[rank] for rank in each) for each in ranks.values()),
    )
