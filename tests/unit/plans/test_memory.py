"""Bytes per tasklet by hand."""

from __future__ import annotations

import pytest

from plans.memory import TaskMemory, decode_batch_of, training_bytes
from plans.spec.job import Optimizer, Precision
from plans.workflow import RlTask
from tests.helpers.planner_cases import paper_job

SHAPE = {"layers": 4, "hidden": 1000, "intermediate": 2000, "heads": 10, "kv_heads": 2, "head_dim": 100, "vocab": 5000,
         "tied": True}  # fmt: skip
LAYER = 2_400_000 + 6_000_000 + 2_000


def memory(task: RlTask, **training: object) -> TaskMemory:
    return TaskMemory(paper_job(SHAPE, prompt=500, response=500, training=training), task)


@pytest.mark.parametrize(
    ("precision", "optimizer", "total"),
    [(Precision.BF16_MIXED, Optimizer.ADAM, 18), (Precision.BF16_MIXED, Optimizer.SGD, 10),
     (Precision.BF16, Optimizer.ADAMW, 8), (Precision.FP32, Optimizer.ADAM, 16), (Precision.FP32, Optimizer.SGD, 8)],
)  # fmt: skip
def test_training_bytes_per_parameter(precision: Precision, optimizer: Optimizer, total: float) -> None:
    split = training_bytes(precision, optimizer)
    assert split.replicated + split.states == total


def test_tied_vocabulary_counts_once_on_one_stage_and_twice_on_two() -> None:
    actor = memory(RlTask.ACTOR_TRAINING)
    assert actor.stage_parameters(4, is_first=True, is_last=True) == 4 * LAYER + 5_000_000
    assert actor.stage_parameters(2, is_first=True, is_last=False) == 2 * LAYER + 5_000_000
    assert actor.stage_parameters(2, is_first=False, is_last=True) == 2 * LAYER + 5_000_000


def test_critic_has_a_scalar_head() -> None:
    critic = memory(RlTask.CRITIC_TRAINING)
    assert critic.stage_parameters(2, is_first=False, is_last=True) == 2 * LAYER + 1000


def test_model_bytes_by_kind_and_sharding() -> None:
    ends = {"is_first": False, "is_last": False}
    assert memory(RlTask.ACTOR_TRAINING).model_bytes(2, **ends, tp=2, dp=4) == 18 * LAYER
    sharded = memory(RlTask.ACTOR_TRAINING, distributed_optimizer=True)
    assert sharded.model_bytes(2, **ends, tp=2, dp=4) == (6 + 12 / 4) * LAYER
    assert memory(RlTask.REWARD_INFERENCE).model_bytes(2, **ends, tp=2, dp=4) == 2 * LAYER


@pytest.mark.parametrize(
    ("precision", "spread", "whole"), [("fp32", 16, 0), ("bf16", 8, 0), ("bf16-mixed", 16, 2)]
)  # fmt: skip
def test_spread_weights_gradients_and_states_are_divided_by_the_replicas(precision, spread, whole) -> None:
    """Two layers of 8,402,000 on four ranks; in mixed precision each rank has whole 16-bit copies beside its part."""
    ends = {"is_first": False, "is_last": False}
    spread_task = memory(RlTask.ACTOR_TRAINING, precision=precision, sharding="full")
    plain = memory(RlTask.ACTOR_TRAINING, precision=precision)
    assert spread_task.model_bytes(2, **ends, tp=1, dp=4) == (spread / 4 + whole) * 2 * LAYER
    assert spread_task.model_bytes(2, **ends, tp=1, dp=1) == plain.model_bytes(2, **ends, tp=1, dp=1)
    inference = memory(RlTask.REFERENCE_INFERENCE, precision=precision, sharding="full")
    assert inference.model_bytes(2, **ends, tp=1, dp=4) == inference.element * 2 * LAYER


@pytest.mark.parametrize(
    ("task", "rest"), [(RlTask.ACTOR_TRAINING, 5_000_000), (RlTask.CRITIC_TRAINING, 5_001_000)]
)  # fmt: skip
def test_a_rank_gathers_two_layers_and_what_is_no_layer(task, rest) -> None:
    """fp32: 4 bytes x (2 layers + 1 layer's gradients + weights and gradients of embedding and head)."""
    place = {"stage": 0, "num_stages": 1, "tp": 1, "micro_batch_size": 1, "micro_batches": 1}
    spread, plain = (memory(task, precision="fp32", sharding=name) for name in ("full", "none"))
    gathered = 4 * (3 * LAYER + 2 * rest)
    assert spread.working_bytes(4, **place, dp=4) - plain.working_bytes(4, **place, dp=4) == gathered
    assert spread.working_bytes(4, **place, dp=1) == plain.working_bytes(4, **place, dp=1)


def test_training_spread_over_two_gpus_fits_where_whole_copies_do_not() -> None:
    """By hand, fp32, 4 layers of 8,402,000 and a vocabulary matrix of 5,000,000, tied: P = 38,608,000 parameters.

    Whole: 16 P = 617,728,000 bytes. Over two: 8 P = 308,864,000, and while it works 4 x (3 x 8,402,000 + 2 x 5,000,000)
    = 140,824,000 gathered.
    """
    place = {"stage": 0, "num_stages": 1, "tp": 1, "micro_batch_size": 1, "micro_batches": 1}
    ends = {"is_first": True, "is_last": True}
    whole, spread = (memory(RlTask.ACTOR_TRAINING, precision="fp32", sharding=name) for name in ("none", "full"))
    activations = whole.working_bytes(4, **place, dp=2)
    assert whole.model_bytes(4, **ends, tp=1, dp=2) == 617_728_000
    assert spread.model_bytes(4, **ends, tp=1, dp=2) == 308_864_000
    assert spread.working_bytes(4, **place, dp=2) == activations + 140_824_000


def test_working_bytes_of_training_with_and_without_recompute() -> None:
    place = {"stage": 1, "num_stages": 4, "tp": 2, "dp": 1, "micro_batch_size": 2, "micro_batches": 8}
    # 3 micro-batches in flight, 2000 tokens: 3*5*2*2000*1000/2 + 34*2000*1000/2.
    assert memory(RlTask.ACTOR_TRAINING).working_bytes(5, **place) == 3 * 5 * 2e6 + 34e6
    assert memory(RlTask.ACTOR_TRAINING, recompute="none").working_bytes(5, **place) == 3 * 5 * 34e6
    assert memory(RlTask.ACTOR_TRAINING, sequence_parallel=False).working_bytes(5, **place) == 3 * 5 * 4e6 + 34e6


def test_last_stage_adds_logits_except_for_scalar_heads() -> None:
    place = {"stage": 0, "num_stages": 1, "tp": 1, "dp": 1, "micro_batch_size": 1, "micro_batches": 1}
    hidden = 2 * 1000 * (4 * 1000 + 2 * 2000)
    assert memory(RlTask.REFERENCE_INFERENCE).working_bytes(4, **place) == hidden + 1000 * 5000 * 2
    assert memory(RlTask.REWARD_INFERENCE).working_bytes(4, **place) == hidden
    assert memory(RlTask.ACTOR_TRAINING).working_bytes(4, **place) == 4 * 2e6 + 34e6 + 1000 * 5000 * 6


def test_fp32_doubles_weights_and_activations() -> None:
    place = {"stage": 0, "num_stages": 2, "tp": 1, "dp": 1, "micro_batch_size": 1, "micro_batches": 1}
    assert memory(RlTask.ACTOR_TRAINING, precision="fp32").working_bytes(4, **place) == 4 * 4e6 + 68e6
    assert memory(RlTask.ACTOR_GENERATION, precision="fp32").model_bytes(
        1, is_first=False, is_last=False, tp=1, dp=1) == 4 * LAYER  # fmt: skip


@pytest.mark.parametrize(("tp", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_cache_is_sharded_over_key_value_heads_at_most(tp: int, heads: int) -> None:
    assert memory(RlTask.ACTOR_GENERATION).cache_bytes(4, tp) == 1000 * 4 * 2 * heads * 100 * 2


@pytest.mark.parametrize(("free", "batch"), [(-1.0, 0), (9.0, 0), (25.0, 2), (1e9, 64)])
def test_decode_batch_is_what_fits_up_to_the_cap(free: float, batch: int) -> None:
    assert decode_batch_of(free, 10.0, 64) == batch
