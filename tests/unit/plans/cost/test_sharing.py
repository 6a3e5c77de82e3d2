"""Gradient rings that cross the same link: who shares with whom, and what a link then takes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plans.cost.collectives import LinkTimes
from plans.cost.sharing import fullest_link_s

INSIDE, NEAR_S, FAR_S = 1e-9, 1e-8, 4e-8
LATENCY_S = 0.5


def links(*, forbidden: tuple[int, int] | None = None) -> LinkTimes:
    """Three machines; 0-1 and 1-2 are near, 0-2 is far, each half a second away."""
    inverse = np.array([[INSIDE, NEAR_S, FAR_S], [NEAR_S, INSIDE, NEAR_S], [FAR_S, NEAR_S, INSIDE]])
    latency = np.where(np.eye(3, dtype=bool), 0.0, LATENCY_S)
    if forbidden is not None:
        a, b = forbidden
        latency[a, b] = latency[b, a] = math.inf
        inverse[a, b] = inverse[b, a] = 0.0
    return LinkTimes(latency, inverse, latency_per_step=True)


def test_rings_inside_a_machine_share_nothing() -> None:
    assert fullest_link_s(links(), {((0, 0), 1e6): 4, ((1, 1), 1e9): 1}) == 0.0


def test_rings_over_the_same_machines_queue_and_pay_latency_once() -> None:
    # Two GPUs per ring: 2 (2 - 1) rounds of latency, and 3 * 1e6 + 2e6 bytes.
    rings = {((0, 1), 1e6): 3, ((0, 1), 2e6): 1}
    assert fullest_link_s(links(), rings) == pytest.approx(2 * LATENCY_S + 5e6 * NEAR_S)


def test_rings_that_meet_on_one_link_share_only_that_one() -> None:
    # 0-1-2-0 crosses 0-1 as 0-1-1 does, but alone crosses the far link back.
    rings = {((0, 1, 2), 1e6): 1, ((0, 1, 1), 9e6): 1}
    assert fullest_link_s(links(), rings) == pytest.approx(4 * LATENCY_S + 10e6 * NEAR_S)
    assert fullest_link_s(links(), {((0, 1, 2), 1e6): 1}) == pytest.approx(4 * LATENCY_S + 1e6 * FAR_S)


def test_directions_of_a_link_do_not_share() -> None:
    # A ring of two goes there and back, and each direction carries its bytes once.
    assert fullest_link_s(links(), {((0, 2), 1e6): 1}) == pytest.approx(2 * LATENCY_S + 1e6 * FAR_S)


def test_a_ring_that_can_avoid_a_forbidden_link_is_shared_by_its_equals() -> None:
    # 0-1-2-0 would need 0-2; with a second GPU on 1 the ring goes 0-1-2-1, over near links only.
    barred = links(forbidden=(0, 2))
    rings = {((0, 1, 1, 2), 1e6): 3}
    assert fullest_link_s(barred, rings) == pytest.approx(6 * LATENCY_S + 3e6 * NEAR_S)
    assert fullest_link_s(barred, {((0, 1, 2), 1e6): 1}) == math.inf
