"""Pacing: when the generation of an iteration may start, and which policy versions may sample it.

Two bounds that are often mixed up: *pacing* says how far generation runs ahead of training, the *staleness bound* says
how old a rollout may be when it is trained on. Both count policy versions. Pure arithmetic.

References:
    AReaL (Fu et al. 2025): the number of rollouts that may be in the system, from staleness bound, version and counts.
"""

from __future__ import annotations


def free_slots(
    *, max_concurrent: int | None, running: int, max_lead: int, version: int, batch: int, accepted: int
) -> int:
    """Return how many rollouts may be begun now; 0 or less means none.

    Args:
        max_concurrent: Rollouts that may run at once; None = any number.
        running: Rollouts begun and not yet finished.
        max_lead: Policy versions that generation may be ahead (AReaL's eta), >= 0.
        version: Newest committed policy version.
        batch: Rollouts that one version trains on, > 0.
        accepted: Rollouts finished so far, those of earlier lives of the run included: after a recovery the version
            stands where it stood, and a count that started at 0 again would open the gate far too wide (AReaL#1345).

    Example:
        max_lead 4, version 10, batch 32, accepted 320, running 0: (4 + 10 + 1) * 32 - 320 = 160.
    """
    slots = (max_lead + version + 1) * batch - (accepted + running)
    return slots if max_concurrent is None else min(max_concurrent - running, slots)


def accepted_after_recovery(version: int, batch: int) -> int:
    """Return the rollouts that count as finished when a run continues at a version: each version used one batch."""
    return version * batch


def version_needed(iteration: int, max_lead: int) -> int:
    """Return the policy version that must be committed before an iteration is sampled.

    It is the least one at which the counter rule has room for the iteration's batch after the batches of all earlier
    iterations, finished or not: (max_lead + version + 1) - iteration >= 1. Counting iterations leaves nothing to
    restore after a crash.
    """
    return max(0, iteration - max_lead)


def may_generate(iteration: int, version: int | None, max_lead: int) -> bool:
    """Whether an iteration may be sampled when `version` is the newest committed one (None: none is)."""
    if version is None:
        return False
    # Iterations are begun in order, so what is finished or running are the batches of all earlier ones.
    return (
        free_slots(max_concurrent=None, running=0, max_lead=max_lead, version=version, batch=1, accepted=iteration) > 0
    )


def lag(trained_version: int, sampled_version: int) -> int:
    """Return the age of a rollout at its consumption, policy versions; the time it lay in a queue is part of it."""
    return trained_version - sampled_version
