"""The rollout buffer: bounds, order, counts and the document in a resume point."""

from __future__ import annotations

import pytest

from stages.errors import ContractError, StaleRolloutError
from stages.staleness.buffer import GroupRef, RolloutBuffer, Taken


def groups(iteration: int, *versions: int) -> list[GroupRef]:
    return [GroupRef(version, iteration, place) for place, version in enumerate(versions)]


def taken(buffer: RolloutBuffer, arrivals: list[GroupRef], wanted: int = 2, bound: int = 1) -> Taken:
    return buffer.take(arrivals, max_staleness=bound, wanted=wanted)


@pytest.mark.parametrize(("age", "is_withheld"), [(0, False), (1, False), (2, False), (3, True)])
def test_group_at_exactly_the_bound_is_trained_on(age: int, is_withheld: bool) -> None:
    """T2, T12: limit - 1 and limit are fresh, limit + 1 is withheld and counted."""
    found = taken(RolloutBuffer(version=5), groups(5, 5 - age, 5), bound=2)

    assert len(found.withheld) == int(is_withheld)
    assert found.counts()["groups_withheld"] == int(is_withheld)
    assert found.counts()["groups_missing"] == int(is_withheld)


def test_withheld_groups_are_refilled_oldest_first() -> None:
    """T12: dropped, counted, and replaced by what waits."""
    first = taken(RolloutBuffer(version=0), groups(0, 0, 0, 0, 0), wanted=2)
    assert (first.batch, first.after.groups) == (tuple(groups(0, 0, 0)), (GroupRef(0, 0, 2), GroupRef(0, 0, 3)))

    second = taken(first.after, groups(1, 1, 0, 1), wanted=4)
    assert second.batch == (GroupRef(0, 0, 2), GroupRef(0, 0, 3), GroupRef(0, 1, 1), GroupRef(1, 1, 0))
    assert second.num_refilled == 2

    third = taken(second.after, groups(2, 0, 2), wanted=2)
    assert (third.withheld, third.batch) == ((GroupRef(0, 2, 0),), (GroupRef(1, 1, 2), GroupRef(2, 2, 1)))


def test_group_that_waits_too_long_is_withheld() -> None:
    """T7: its age is counted when its turn comes, not when it was sampled."""
    first = taken(RolloutBuffer(version=3), groups(3, 3, 3, 3), wanted=2)
    second = taken(first.after, [], wanted=0)
    third = taken(second.after, groups(5, 5, 5), wanted=2)

    assert third.withheld == (GroupRef(3, 3, 2),)
    assert third.counts()["groups_withheld_total"] == 1


def test_batch_of_stale_groups_only_is_empty_and_the_run_goes_on() -> None:
    """T9: everything is too old; it is withheld, the version advances, nothing waits for ever."""
    found = taken(RolloutBuffer(version=5), groups(5, 2, 2), bound=2)

    assert (found.batch, found.after.version, found.after.num_withheld) == ((), 6, 2)


def test_group_of_a_later_version_is_refused() -> None:
    """Never a negative lag."""
    with pytest.raises(StaleRolloutError, match="sampled from policy version 4, but training starts from version 3"):
        taken(RolloutBuffer(version=3), groups(3, 4))


@pytest.mark.parametrize("arrivals", [groups(2, 2), [*groups(3, 3), *groups(3, 3)]])
def test_arrival_of_another_iteration_or_twice_is_refused(arrivals: list[GroupRef]) -> None:
    with pytest.raises(ContractError, match="repeat stage generate"):
        taken(RolloutBuffer(version=3), arrivals)


def test_document_is_read_back_equal() -> None:
    after = taken(RolloutBuffer(version=0), groups(0, 0, 0, 0), wanted=2).after

    assert RolloutBuffer.from_json(after.to_json(), 1) == after
    assert RolloutBuffer.from_json(None, 0) == RolloutBuffer(version=0)


@pytest.mark.parametrize(
    "change", [{"version": 3}, {"num_made": 9}, {"groups": [["x"]]}, {"groups": None}, {"format": "other"}]
)
def test_document_that_does_not_fit_is_refused(change: dict[str, object]) -> None:
    document = taken(RolloutBuffer(version=0), groups(0, 0, 0, 0), wanted=2).after.to_json()

    with pytest.raises(ContractError, match="resume point of version 1 has no usable rollout buffer"):
        RolloutBuffer.from_json({**document, **change}, 1)
    with pytest.raises(ContractError, match="it is missing"):
        RolloutBuffer.from_json(None, 1)
