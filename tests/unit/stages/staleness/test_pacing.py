from __future__ import annotations

import pytest

from stages.staleness.pacing import accepted_after_recovery, free_slots, lag, may_generate, version_needed


@pytest.mark.parametrize(
    ("max_lead", "version", "accepted", "running", "slots"),
    [
        (4, 0, 0, 0, 160),
        (4, 10, 0, 0, 480),  # what a count that restarted at 0 after a recovery would allow
        (4, 10, accepted_after_recovery(10, 32), 0, 160),
        (0, 3, 96, 32, 0),
    ],
)
def test_counter_rule_has_areals_values(max_lead: int, version: int, accepted: int, running: int, slots: int) -> None:
    """T1, AReaL#1345: after a recovery 160 slots are free, not 480."""
    found = free_slots(
        max_concurrent=None, running=running, max_lead=max_lead, version=version, batch=32, accepted=accepted
    )
    assert found == slots


def test_concurrency_bounds_the_free_slots() -> None:
    assert free_slots(max_concurrent=50, running=20, max_lead=4, version=0, batch=32, accepted=0) == 30


@pytest.mark.parametrize(("iteration", "lead", "needed"), [(0, 0, 0), (5, 0, 5), (5, 2, 3), (1, 2, 0)])
def test_version_that_an_iteration_waits_for(iteration: int, lead: int, needed: int) -> None:
    assert version_needed(iteration, lead) == needed


def test_gate_opens_at_exactly_the_lead() -> None:
    """T2, T4: no version too early, none too late; the version itself is what moves the gate."""
    assert [may_generate(5, version, 2) for version in (2, 3, 4)] == [False, True, True]
    assert may_generate(0, 0, 0)
    assert not may_generate(0, None, 3)


def test_lag_counts_the_time_in_the_queue() -> None:
    """T7: a rollout of version 3 that waits while versions 4 and 5 are trained is 2 old, whenever it was put away."""
    assert [lag(version, 3) for version in (3, 4, 5)] == [0, 1, 2]
