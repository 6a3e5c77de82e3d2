"""Laws of shared links, for the calibrated model's gradient all-reduce."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.cost import CostModel, PlanEvaluator
from plans.cost.calibration import Calibration, LinkEfficiency
from plans.cost.sharing import fullest_link_s
from plans.simulate.network import Network
from plans.simulate.physics import Physics, StagePlace
from plans.simulate.recorder import Recorder
from plans.simulate.training import OPTIMIZER_BYTES_PER_PARAMETER, TrainingTask
from plans.workflow import RlTask, shape_of
from tests.helpers.planner_cases import cost_of, hand_task, paper_cluster, paper_job

MACHINES = [("A100-40", region, 4) for region in ("va", "oh", "va", "fr", "pa")]
CLUSTER = paper_cluster(MACHINES, local_gbps=25.0)
JOB = paper_job("llama3-8b", algorithm="grpo", prompts=40, responses=1)
PEAK_LINKS = CostModel.calibrated(Calibration(links=LinkEfficiency(within_machine=1.0, between_machines=1.0)))
EVALUATOR = PlanEvaluator(CLUSTER, JOB, PEAK_LINKS)
TASK, LAYERS, BYTES = RlTask.ACTOR_TRAINING, 32, 2
SHAPE = shape_of(JOB, TASK)
seeds = st.integers(0, 2**32 - 1)
DEGREES = [(pp, tp) for pp in (1, 2, 4) for tp in (1, 2, 4) if pp * tp <= 4]


def gradient_s(grid: np.ndarray, layers: tuple[int, ...]) -> float:
    return cost_of(EVALUATOR, TASK, hand_task(grid, layers, _even(40, len(grid)))).dp_s


def simulated_s(grid: np.ndarray, layers: tuple[int, ...]) -> float:
    """Return what the simulator's all-reduce takes: an update without micro-batches, less the optimiser."""
    env, last = simpy.Environment(), len(layers) - 1
    physics = Physics(CLUSTER, {}, [])
    stages = [
        [
            StagePlace(kind=TASK.kind, shape=SHAPE, gpus=tuple(gpus), layers=count, is_first=j == 0, is_last=j == last,
                       has_scalar_head=False, bytes_per_value=BYTES)
            for j, (gpus, count) in enumerate(zip(replica, layers, strict=True))
        ]
        for replica in grid.tolist()
    ]  # fmt: skip
    task = TrainingTask(env, physics, Network(env, CLUSTER, physics), [], stages, [], updates=1,
                        label=(TASK.value, 0), recorder=Recorder())  # fmt: skip
    env.run(until=env.process(task.run()))
    steps = [physics.optimizer_step_s(place, OPTIMIZER_BYTES_PER_PARAMETER) for row in stages for place in row]
    return float(env.now) - max(steps)


def _even(total: int, parts: int) -> list[int]:
    return [b - a for a, b in pairwise(round(total * i / parts) for i in range(parts + 1))]


def _random_grid(rng: np.random.Generator) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return random replicas whose TP groups lie inside a machine, and layers per stage."""
    pp, tp = DEGREES[rng.integers(len(DEGREES))]
    units = rng.permutation(np.arange(20).reshape(-1, tp))
    dp = int(rng.integers(2, len(units) // pp + 1))
    return units[: dp * pp].reshape(dp, pp, tp), tuple(_even(LAYERS, pp))


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_the_model_takes_as_long_as_the_simulator_runs(seed):
    grid, layers = _random_grid(np.random.default_rng(seed))
    assert gradient_s(grid, layers) == pytest.approx(simulated_s(grid, layers), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, degrees=st.sampled_from(DEGREES))
def test_replicas_on_machines_of_their_own_send_the_whole_gradient_over_one_link(seed, degrees):
    """Whatever pp and tp are: 2 (R - 1) / R of the model's gradient, 8.03e9 weights of two bytes, at 5 Gbit/s."""
    pp, tp = degrees
    machines = np.random.default_rng(seed).permutation([0, 1, 3, 4])[:3]
    grid = np.stack([4 * machine + np.arange(pp * tp).reshape(pp, tp) for machine in machines])
    weights = SHAPE.layer_parameters * LAYERS + 2 * SHAPE.embedding_parameters
    by_hand = 4 * 0.010 + 2 * weights * 4 / 3 / 0.625e9
    assert gradient_s(grid, tuple(_even(LAYERS, pp))) == pytest.approx(by_hand, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(seed=seeds)
def test_one_more_ring_never_makes_the_fullest_link_faster(seed):
    rng = np.random.default_rng(seed)
    rings: dict[tuple[tuple[int, ...], float], int] = {}
    before = 0.0
    for _ in range(6):
        ring = tuple(sorted(rng.integers(0, 5, size=4).tolist())), float(rng.integers(1, 4)) * 1e6
        rings[ring] = rings.get(ring, 0) + 1
        now = fullest_link_s(EVALUATOR.links, rings)
        alone = EVALUATOR.links.ring_s(*ring) if len(set(ring[0])) > 1 else 0.0
        assert now >= max(before, alone) * (1.0 - 1e-12)
        before = now
