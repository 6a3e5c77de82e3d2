"""Laws of advantages and losses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from stages.rl.advantages import estimate_advantages  # noqa: E402 - torch checked first
from stages.rl.aggregation import AGGREGATIONS, count_normaliser  # noqa: E402
from stages.rl.gae import gae  # noqa: E402
from stages.rl.kl import kl_per_token  # noqa: E402
from stages.rl.losses import PolicyBatch, policy_loss  # noqa: E402
from stages.rl.spec import AdvantageSpec, GrpoSpec  # noqa: E402

pytestmark = pytest.mark.engines

rewards_lists = st.lists(st.floats(-10, 10, width=16), min_size=2, max_size=24)
specs = st.builds(
    AdvantageSpec,
    estimator=st.sampled_from(["group", "rloo"]),
    normalisation=st.sampled_from(["std", "none", "batch_std"]),
)
losses = st.sampled_from(["grpo", "dr_grpo", "dapo", "gspo", "rloo"])
seeds = st.integers(0, 2**31)


def grouped(rewards: list[float], seed: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return np.array(rewards), rng.random(len(rewards)) < 0.8, rng.integers(0, 4, len(rewards)).tolist()


def random_batch(seed: int, rows: int = 5, positions: int = 7) -> PolicyBatch:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, positions, generator=generator)
    return PolicyBatch(
        logprobs=old + 0.3 * torch.randn(rows, positions, generator=generator),
        old_logprobs=old,
        advantages=torch.randn(rows, 1, generator=generator),
        mask=torch.rand(rows, positions, generator=generator) < 0.7,
        reference_logprobs=old + 0.3 * torch.randn(rows, positions, generator=generator),
        correction_weights=2 * torch.rand(rows, positions, generator=generator),
    )


def part_of(batch: PolicyBatch, rows: slice, logprobs: torch.Tensor) -> PolicyBatch:
    return PolicyBatch(
        logprobs=logprobs[rows],
        old_logprobs=batch.old_logprobs[rows],
        advantages=batch.advantages[rows],
        mask=batch.mask[rows],
        reference_logprobs=batch.reference_logprobs[rows],
        correction_weights=batch.correction_weights[rows],
    )


@settings(deadline=None)
@given(rewards_lists, seeds, specs)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float], seed: int, spec: AdvantageSpec) -> None:
    values, valid, groups = grouped(rewards, seed)
    result = estimate_advantages(values, valid, groups, spec)
    for group in set(groups):
        members = np.array(groups) == group
        scale = max(1.0, float(np.abs(result.values[members]).sum()))
        assert abs(result.values[members].sum()) <= 1e-9 * scale


@settings(deadline=None)
@given(st.lists(st.integers(-8, 8), min_size=2, max_size=24), seeds, specs, st.integers(-100, 100))
def test_advantages_do_not_change_when_all_rewards_shift(
    rewards: list[int], seed: int, spec: AdvantageSpec, shift: int
) -> None:
    values, valid, groups = grouped([float(reward) for reward in rewards], seed)
    before = estimate_advantages(values, valid, groups, spec).values
    after = estimate_advantages(values + shift, valid, groups, spec).values
    np.testing.assert_allclose(after, before, atol=1e-9)


@settings(deadline=None)
@given(rewards_lists, seeds, specs)
def test_n11_shuffled_rows_give_bit_equal_advantages(rewards: list[float], seed: int, spec: AdvantageSpec) -> None:
    values, valid, groups = grouped(rewards, seed)
    order = np.random.default_rng(seed + 1).permutation(len(rewards))
    before = estimate_advantages(values, valid, groups, spec)
    after = estimate_advantages(values[order], valid[order], [groups[i] for i in order], spec)
    assert after.values.tolist() == before.values[order].tolist()
    assert after.zero_variance.tolist() == before.zero_variance[order].tolist()


@settings(deadline=None)
@given(rewards_lists, seeds, specs)
def test_n12_rewards_of_invalid_rows_are_never_read(rewards: list[float], seed: int, spec: AdvantageSpec) -> None:
    values, valid, groups = grouped(rewards, seed)
    poisoned = np.where(valid, values, np.nan)
    assert (
        estimate_advantages(poisoned, valid, groups, spec).values.tolist()
        == estimate_advantages(values, valid, groups, spec).values.tolist()
    )


@settings(deadline=None)
@given(seeds, losses, st.sampled_from(sorted(AGGREGATIONS)), st.integers(1, 5))
def test_n16_loss_and_gradient_do_not_depend_on_the_micro_batch_split(
    seed: int, loss: str, aggregation: str, size: int
) -> None:
    batch = random_batch(seed)
    spec = GrpoSpec.model_validate({"loss": loss, "loss_aggregation": aggregation, "kl": {"weight": 0.1}})
    normaliser = count_normaliser(batch.mask, 16)
    whole_logprobs = batch.logprobs.clone().requires_grad_()
    whole = policy_loss(part_of(batch, slice(None), whole_logprobs), spec, normaliser)
    whole.loss.backward()
    split_logprobs = batch.logprobs.clone().requires_grad_()
    total = 0.0
    for start in range(0, 5, size):
        part = policy_loss(part_of(batch, slice(start, start + size), split_logprobs), spec, normaliser)
        part.loss.backward()
        total += part.loss.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(split_logprobs.grad, whole_logprobs.grad)


@settings(deadline=None)
@given(seeds, losses)
def test_masked_tokens_have_zero_gradient(seed: int, loss: str) -> None:
    batch = random_batch(seed)
    logprobs = batch.logprobs.clone().requires_grad_()
    spec = GrpoSpec.model_validate({"loss": loss, "kl": {"weight": 0.1}})
    policy_loss(part_of(batch, slice(None), logprobs), spec, count_normaliser(batch.mask, 16)).loss.backward()
    assert (logprobs.grad[~batch.mask] == 0).all()


@settings(deadline=None)
@given(seeds, losses)
def test_on_policy_ratio_is_one_and_nothing_is_clipped(seed: int, loss: str) -> None:
    batch = random_batch(seed)
    on_policy = PolicyBatch(
        logprobs=batch.old_logprobs, old_logprobs=batch.old_logprobs, advantages=batch.advantages, mask=batch.mask
    )
    sums = policy_loss(on_policy, GrpoSpec.model_validate({"loss": loss}), count_normaliser(batch.mask, 16)).sums
    assert sums["ratio"] == sums["num_tokens"]
    assert (sums["clipped_low"], sums["clipped_high"], sums["dual_clipped"]) == (0, 0, 0)


@settings(deadline=None)
@given(st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=16), st.floats(-30, 30, width=32))
def test_n14_k2_and_k3_are_non_negative_and_zero_for_equal_policies(logprobs: list[float], distance: float) -> None:
    policy = torch.tensor([logprobs])
    mask = torch.ones_like(policy, dtype=torch.bool)
    for estimator in ("k2", "k3", "k3_straight_through"):
        assert (kl_per_token(policy, policy, mask, estimator) == 0).all()
        assert (kl_per_token(policy, policy + distance, mask, estimator) >= -1e-7).all()


@settings(deadline=None)
@given(seeds)
def test_gae_with_lambda_one_is_return_minus_value(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(3, 6)), rng.normal(size=(3, 6))
    mask = np.ones((3, 6), bool)
    result = gae(rewards, values, mask, discount=1.0, gae_lambda=1.0)
    future = rewards[:, ::-1].cumsum(axis=1)[:, ::-1]
    np.testing.assert_allclose(result.advantages, future - values, atol=1e-12)
    np.testing.assert_allclose(result.returns, future, atol=1e-12)
