"""Level 1 of the search: task groupings, i.e. set partitions of the workflow's tasks (HetRL section 6).

A group shares GPUs and co-locates its models. In async mode generation shares no GPU with another task, so only
partitions in which it is alone are placements (reconstruction, hetrl.md 4.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from plans.spec.job import Mode
from plans.workflow import RlTask, Workflow

Grouping = tuple[tuple[RlTask, ...], ...]
ItemT = TypeVar("ItemT")


def set_partitions(items: Sequence[ItemT]) -> Iterator[tuple[tuple[ItemT, ...], ...]]:
    """Yield every set partition once: blocks ordered by their first item, items in the given order."""
    if not items:
        yield ()
        return
    *before, last = items
    for partition in set_partitions(before):
        for index, block in enumerate(partition):
            yield (*partition[:index], (*block, last), *partition[index + 1 :])
        yield (*partition, (last,))


def task_groupings(workflow: Workflow) -> tuple[Grouping, ...]:
    """Return every grouping that a workflow allows: all of them in sync mode, generation alone in async mode."""
    alone = (RlTask.ACTOR_GENERATION,)
    if workflow.mode is Mode.SYNC:
        return tuple(set_partitions(workflow.tasks))
    others = [task for task in workflow.tasks if task is not RlTask.ACTOR_GENERATION]
    return tuple((alone, *partition) for partition in set_partitions(others))
