"""Ranks follow the plan's devices, not the order in which machines start."""

from __future__ import annotations

import pytest

from plans.plan import PipelineStage, Replica, TaskPlan
from stages.gang_layout import gang_layout, has_several_machines


def placed(*replicas: list[list[str]]) -> TaskPlan:
    """Return a task whose replicas have these devices per stage."""
    return TaskPlan(
        dp=len(replicas), pp=len(replicas[0]), tp=len(replicas[0][0]),
        replicas=tuple(
            Replica(samples=4, stages=tuple(PipelineStage(layers=2, gpus=tuple(gpus)) for gpus in stages))
            for stages in replicas
        ),
    )  # fmt: skip


def test_megatron_ranks_are_the_plans_devices_in_order():
    # Two replicas of two stages; each pipeline crosses from machine b to machine a.
    layout = gang_layout(placed([["b/1"], ["a/0"]], [["b/0"], ["a/1"]]), "megatron")

    assert layout.machines == ("b", "a")
    assert layout.lead == "b"
    assert layout.ranks == ((0, 2), (1, 3))
    assert layout.devices_of("b") == ("b/1", "b/0")
    assert layout.devices_of("a") == ("a/0", "a/1")


def test_accelerate_has_a_rank_per_replica():
    # On CPU the further devices of a replica are threads of one process.
    layout = gang_layout(placed([["a/0", "a/1"]], [["b/0", "b/1"]], [["a/2", "a/3"]]), "accelerate")

    assert layout.machines == ("a", "b")
    assert layout.ranks == ((0, 2), (1,))
    assert layout.devices == (("a/0", "a/2"), ("b/0",))


@pytest.mark.parametrize(("devices", "expected"), [(["a/0", "a/1"], False), (["a/0", "b/0"], True)])
def test_one_machine_is_no_gang(devices, expected):
    assert has_several_machines(placed(*([[device]] for device in devices))) is expected
