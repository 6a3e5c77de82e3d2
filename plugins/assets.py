"""The asset of a run's rollouts, with a partition for every iteration: what DAGs of a data team are scheduled on.

Only the task `report` has it as an outlet: when it ends, rollouts, rewards and training columns of the iteration are
committed. An iteration that is run again emits its partition again, so consumers must be idempotent by key.
"""

from __future__ import annotations

import re
from typing import Final

from airflow.sdk import Asset

from stages.errors import ContractError

_PARTITION: Final = re.compile(r"iter-([0-9]{6,})\Z")


def rollouts_asset(run: str) -> Asset:
    """Return the asset of a run's rollouts."""
    return Asset(name=f"motley.{run}.rollouts", uri=f"motley://{run}/rollouts", group="motley")


def partition_of(iteration: int) -> str:
    """Return the partition key of an iteration."""
    return f"iter-{iteration:06d}"


def iteration_of_partition(key: str | None) -> int:
    """Return the iteration of a partition key.

    Raises:
        ContractError: no key (a run that somebody triggered by hand without one), or not one of an iteration.
    """
    found = _PARTITION.match(key or "")
    if found is None:
        raise ContractError(
            f"the DAG run's partition key is {key!r}, but it names an iteration as {partition_of(12)}; trigger it with "
            "such a key, or let the run's report task do it."
        )
    return int(found[1])
