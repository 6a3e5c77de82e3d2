"""How long a run keeps its rollouts, as its job says, and which ones its resume points still need."""

from __future__ import annotations

from stages.spec.execution import StorageSpec
from stages.staleness.buffer import RolloutBuffer
from storage.checkpoints import load_checkpoint, read_index
from storage.rollout_retention import RolloutRule
from storage.store import Store


def rollout_rule(storage: StorageSpec) -> RolloutRule | None:
    """Return the rule of a job, None where everything is kept."""
    if not storage.keep_rollouts and not storage.keep_rollouts_days:
        return None
    return RolloutRule(keep_iterations=storage.keep_rollouts or None, keep_days=storage.keep_rollouts_days or None)


def needed_rollouts(home: Store, run: str) -> set[int]:
    """Return the iterations with groups that wait in the buffer of a resume point, so that it can be gone on from.

    Raises:
        CorruptObjectError: a resume point can't be read.
        ContractError: its buffer can't be read.
    """
    needed = set[int]()
    for version in read_index(home, run):
        checkpoint = load_checkpoint(home, run, version)
        buffer = RolloutBuffer.from_json(checkpoint.manifest.metadata.get("buffer"), version)
        needed.update(group.iteration for group in buffer.groups)
    return needed
