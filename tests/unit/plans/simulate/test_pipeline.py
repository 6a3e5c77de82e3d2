from __future__ import annotations

import pytest
import simpy

from plans.simulate.network import Network
from plans.simulate.physics import Physics, StagePlace
from plans.simulate.pipeline import MicroBatch, Pass, PipelineReplica, one_forward_one_backward
from plans.workflow import TaskKind
from tests.unit.plans.simulate.builders import cluster_of, job_of


def _names(order: list[Pass]) -> str:
    return " ".join(("B" if step.is_backward else "F") + str(step.micro_batch) for step in order)


@pytest.mark.parametrize(
    ("stage", "stages", "batches", "expected"),
    [
        (0, 2, 3, "F0 F1 B0 F2 B1 B2"),
        (1, 2, 3, "F0 B0 F1 B1 F2 B2"),
        (0, 4, 2, "F0 F1 B0 B1"),
        (0, 1, 2, "F0 B0 F1 B1"),
    ],
)
def test_one_forward_one_backward_of_a_stage_is_the_known_order(
    stage: int, stages: int, batches: int, expected: str
) -> None:
    assert _names(one_forward_one_backward(stage, stages, batches)) == expected


def _stage(gpu: int, *, first: bool, last: bool) -> StagePlace:
    shape = job_of().models.actor.llm
    return StagePlace(
        kind=TaskKind.TRAINING, shape=shape, gpus=(gpu,), layers=2, is_first=first, is_last=last, has_scalar_head=True,
        bytes_per_value=2,
    )  # fmt: skip


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_training_pipeline_of_equal_stages_takes_batches_plus_stages_minus_one_slots(batches: int) -> None:
    """With equal stages and instant links, 1F1B takes (m + p - 1) (f + b): the textbook bubble."""
    cluster = cluster_of(1, 2)
    env = simpy.Environment()
    physics = Physics(cluster, {}, [])
    stages = [_stage(0, first=True, last=False), _stage(1, first=False, last=True)]
    batch = MicroBatch.of([24.0])
    replica = PipelineReplica(
        env, physics, Network(env, cluster, physics), stages, is_training=True, is_recomputed=False
    )
    env.run(until=env.process(replica.run([batch] * batches)))
    forward = physics.forward_s(stages[0], batch.tokens, batch.attended, batch.tokens)
    backward = physics.backward_s(stages[0], batch.tokens, batch.attended, batch.tokens, is_recomputed=False)
    assert env.now == pytest.approx((batches + 1) * (forward + backward), rel=0.03)


def test_forward_pass_has_two_flop_per_weight_and_four_per_attended_channel() -> None:
    """2 layers; attention weights 64*16*(8+8) = 16384, MLP 3*64*128 = 24576; 10 tokens attend to 55 positions.

    2 * (2*10*40960 + 4*55*64) = 1,666,560 FLOP, plus a scalar head of 2*10*64 = 1,280: 1,667,840 FLOP at 1e12 FLOP/s.
    """
    place = _stage(0, first=False, last=True)
    seconds = Physics(cluster_of(), {}, []).forward_s(place, 10, 55, 10)
    assert seconds == pytest.approx(1_667_840e-12, rel=1e-12)
