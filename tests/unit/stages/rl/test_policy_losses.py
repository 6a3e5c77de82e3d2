"""Surrogate, KL, aggregation, importance correction and the assembled losses, hand-derived and at extremes."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from stages.rl.aggregation import Normaliser, aggregate, count_normaliser  # noqa: E402 - torch checked first
from stages.rl.correction_spec import CorrectionSpec  # noqa: E402
from stages.rl.importance import ImportanceStats, add_kept_mass, importance_correction  # noqa: E402
from stages.rl.kl import ESTIMATORS, kl_per_token  # noqa: E402
from stages.rl.log_ratio import sequence_log_ratio, token_log_ratio  # noqa: E402
from stages.rl.losses import PolicyBatch, policy_loss  # noqa: E402
from stages.rl.masks import masked_mean, masked_sum  # noqa: E402
from stages.rl.spec import GrpoSpec  # noqa: E402
from stages.rl.surrogate import clipped_surrogate  # noqa: E402
from stages.rl.value_loss import value_loss  # noqa: E402
from stages.rl.variants.registry import VARIANTS  # noqa: E402

pytestmark = pytest.mark.engines
LOSSES = sorted(VARIANTS)


def test_n4_masked_mean_of_nothing_is_zero_and_nan_outside_stays_outside() -> None:
    values = torch.tensor([float("nan"), 2.0, 4.0], requires_grad=True)
    mean = masked_mean(values, torch.tensor([False, True, True]))
    mean.backward()
    assert mean.item() == 3.0
    assert values.grad.tolist() == [0.0, 0.5, 0.5]
    assert masked_mean(values, torch.zeros(3, dtype=torch.bool)).item() == 0.0
    assert masked_sum(values, torch.tensor([False, True, True])).item() == 6.0


def test_surrogate_clips_where_the_ratio_has_gone_far_enough() -> None:
    # ratios 1.5 1.5 0.5 0.5 1.1 with A = 1 -1 1 -1 1, clip 0.2/0.3: -1.3, 1.5, -0.5, 0.8, -1.1
    log_ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1]]).log()
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    result = clipped_surrogate(log_ratio, advantages, clip_low=0.2, clip_high=0.3, dual_clip=None)
    torch.testing.assert_close(result.losses, torch.tensor([[-1.3, 1.5, -0.5, 0.8, -1.1]]))
    assert result.clipped_high.tolist() == [[True, False, False, False, False]]
    assert result.clipped_low.tolist() == [[False, False, False, True, False]]
    assert not result.dual_clipped.any()


def test_dual_clip_bounds_the_loss_of_a_negative_advantage_only() -> None:
    # ratio 10, A = -2: 20 without, 2 * 3 = 6 with c = 3; A = 2: -2 * 1.2.
    log_ratio = torch.tensor([[10.0, 10.0]]).log()
    result = clipped_surrogate(log_ratio, torch.tensor([[-2.0, 2.0]]), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(result.losses, torch.tensor([[6.0, -2.4]]))
    assert result.dual_clipped.tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))],
)
def test_kl_of_twice_the_probability_equals_the_formula(estimator: str, expected: float) -> None:
    value = kl_per_token(
        torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.25)]]), torch.tensor([[True]]), estimator
    )
    assert value.item() == pytest.approx(expected, rel=1e-6)


def test_n14_k3_averaged_under_the_policy_is_the_exact_kl() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / reference).log()).sum()
    mask = torch.ones(1, 3, dtype=torch.bool)
    estimates = kl_per_token(policy.log().unsqueeze(0), reference.log().unsqueeze(0), mask, "k3")
    torch.testing.assert_close((policy * estimates[0]).sum(), exact)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@pytest.mark.parametrize("distance", [-1000.0, -100.0, 100.0, 1000.0])
def test_n1_n2_kl_at_extreme_log_ratios_is_finite_forward_and_backward(estimator: str, distance: float) -> None:
    logprobs = torch.full((1, 2), distance, requires_grad=True)
    value = kl_per_token(logprobs, torch.zeros(1, 2), torch.tensor([[True, False]]), estimator)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[0, 1].item() == 0.0
    if estimator != "k1":
        # Descending the penalty brings the policy back towards the reference.
        assert math.copysign(1, logprobs.grad[0, 0].item()) == math.copysign(1, distance)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("distance", [-100.0, 100.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_n2_policy_loss_at_extreme_ratios_is_finite_forward_and_backward(
    loss: str, distance: float, advantage: float
) -> None:
    spec = GrpoSpec.model_validate({"loss": loss, "kl": {"weight": 0.1}})
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[distance, distance, float("-inf")]], requires_grad=True)
    batch = PolicyBatch(
        logprobs=logprobs,
        old_logprobs=torch.tensor([[0.0, 0.0, float("nan")]]),
        advantages=torch.tensor([[advantage]]),
        mask=mask,
        reference_logprobs=torch.tensor([[0.0, 0.0, float("inf")]]),
        correction_weights=torch.tensor([[1.0, 1.0, float("nan")]]),
    )
    result = policy_loss(batch, spec, count_normaliser(mask, 8))
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[0, 2].item() == 0.0


@pytest.mark.parametrize("loss", LOSSES)
def test_m1_policy_loss_of_an_all_masked_batch_is_zero_with_zero_gradient(loss: str) -> None:
    logprobs = torch.full((2, 3), -100.0, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    batch = PolicyBatch(logprobs=logprobs, old_logprobs=torch.zeros(2, 3), advantages=torch.ones(2, 1), mask=mask)
    result = policy_loss(batch, GrpoSpec.model_validate({"loss": loss}), count_normaliser(mask, 3))
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert logprobs.grad.abs().sum().item() == 0.0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Rows of 1 and 3 tokens with losses 4 | 1 1 1.
        ("token_mean", (4 + 3) / 4),
        ("sequence_mean_token_mean", (4 + 1) / 2),
        ("sequence_mean_token_sum_norm", (4 + 3) / (2 * 10)),
    ],
)
def test_n18_aggregation_of_unequal_lengths_follows_its_name(mode: str, expected: float) -> None:
    mask = torch.tensor([[True, False, False], [True, True, True]])
    losses = torch.tensor([[4.0, 99.0, 99.0], [1.0, 1.0, 1.0]])
    assert aggregate(losses, mask, mode, count_normaliser(mask, 10)).item() == pytest.approx(expected)


def test_m1_fully_masked_rows_count_in_neither_numerator_nor_denominator() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    losses = torch.tensor([[2.0, 4.0], [99.0, 99.0]])
    for mode in ("token_mean", "sequence_mean_token_mean"):
        assert aggregate(losses, mask, mode, count_normaliser(mask, 2)).item() == 3.0


def test_normalisers_of_different_limits_do_not_add() -> None:
    one = Normaliser(num_tokens=1, num_sequences=1, max_response_tokens=8)
    with pytest.raises(ValueError, match="don't belong to one optimizer step"):
        _ = one + Normaliser(num_tokens=1, num_sequences=1, max_response_tokens=9)


def test_l12_truncated_weights_are_min_of_ratio_and_cap_and_the_share_is_reported() -> None:
    trainer = torch.tensor([[3.0, 1.0, 0.5, 7.0]]).log()
    mask = torch.tensor([[True, True, True, False]])
    result = importance_correction(trainer, torch.zeros(1, 4), mask, CorrectionSpec(cap=2.0))
    torch.testing.assert_close(result.weights, torch.tensor([[2.0, 1.0, 0.5, 0.0]]))
    assert result.stats.clipped_fraction == pytest.approx(1 / 3)
    assert result.stats.mean_ratio == pytest.approx(1.5, rel=1e-6)
    # (2 + 1 + .5)^2 / (3 * (4 + 1 + .25)) = 12.25 / 15.75
    assert result.stats.effective_sample_fraction == pytest.approx(12.25 / 15.75, rel=1e-6)


def test_masked_correction_takes_tokens_out_of_weights_and_mask() -> None:
    trainer = torch.tensor([[3.0, 1.0, 0.1]]).log()
    spec = CorrectionSpec(mode="mask", cap=2.0, floor=0.5)
    result = importance_correction(trainer, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), spec)
    assert result.mask.tolist() == [[False, True, False]]
    torch.testing.assert_close(result.weights, torch.tensor([[0.0, 1.0, 0.0]]))
    assert count_normaliser(result.mask, 3).num_tokens == 1


def test_correction_mode_none_weighs_one_and_still_reports_the_ratio() -> None:
    result = importance_correction(
        torch.tensor([[math.log(3)]]), torch.zeros(1, 1), torch.tensor([[True]]), CorrectionSpec(mode="none")
    )
    assert result.weights.tolist() == [[1.0]]
    assert result.stats.mean_ratio == pytest.approx(3, rel=1e-6)


def test_l4_sequence_weight_of_a_long_response_is_length_normalised() -> None:
    # 1000 tokens each 0.01 nats off: exp of the sum would be e^10 = 22026, of the mean e^0.01.
    mask = torch.ones(1, 1000, dtype=torch.bool)
    spec = CorrectionSpec(level="sequence", cap=2.0)
    result = importance_correction(torch.full((1, 1000), 0.01), torch.zeros(1, 1000), mask, spec)
    torch.testing.assert_close(result.weights, torch.full((1, 1000), math.exp(0.01)))
    assert (result.stats.num_ratios, result.stats.clipped_fraction) == (1, 0.0)


def test_l3_uncorrected_top_p_gives_the_kept_mass_as_ratio_and_add_kept_mass_repairs_it() -> None:
    # Sampling with top_p 0.9 renormalises: sampler log-prob = log p - log 0.9, so trainer / sampler = 0.9.
    trainer = torch.full((1, 5), -1.0)
    sampler = trainer - math.log(0.9)
    mask = torch.ones(1, 5, dtype=torch.bool)
    wrong = importance_correction(trainer, sampler, mask, CorrectionSpec())
    right = importance_correction(
        trainer, add_kept_mass(sampler, torch.full((1, 5), math.log(0.9))), mask, CorrectionSpec()
    )
    assert wrong.stats.mean_ratio == pytest.approx(0.9, rel=1e-5)
    assert right.stats.mean_ratio == pytest.approx(1.0, rel=1e-5)


def test_importance_stats_of_parts_add_up() -> None:
    trainer = torch.tensor([[0.1, -0.3], [1.5, 0.2]])
    mask = torch.tensor([[True, True], [True, False]])
    whole = importance_correction(trainer, torch.zeros(2, 2), mask, CorrectionSpec()).stats
    parts = [
        importance_correction(trainer[i : i + 1], torch.zeros(1, 2), mask[i : i + 1], CorrectionSpec()).stats
        for i in (0, 1)
    ]
    total = parts[0] + parts[1]
    assert total.num_ratios == whole.num_ratios == 3
    assert total.effective_sample_fraction == pytest.approx(whole.effective_sample_fraction)
    assert total.max_abs_log_ratio == whole.max_abs_log_ratio == 1.5


def test_importance_stats_of_nothing_are_zero() -> None:
    stats = importance_correction(
        torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool), CorrectionSpec()
    ).stats
    assert stats == ImportanceStats()
    assert (stats.mean_ratio, stats.effective_sample_fraction) == (0.0, 0.0)


def test_gspo_ratio_is_one_per_response() -> None:
    mask = torch.tensor([[True, True, False]])
    log_ratio = sequence_log_ratio(torch.tensor([[0.2, 0.4, 9.0]]), torch.zeros(1, 3), mask)
    torch.testing.assert_close(log_ratio, torch.tensor([[0.3, 0.3, 0.0]]))


def test_token_log_ratio_sends_no_gradient_into_the_old_policy() -> None:
    old = torch.zeros(1, 1, requires_grad=True)
    new = torch.zeros(1, 1, requires_grad=True)
    token_log_ratio(new, old, torch.tensor([[True]])).sum().backward()
    assert old.grad is None
    assert new.grad.tolist() == [[1.0]]


def test_kl_weight_without_reference_logprobs_is_refused() -> None:
    mask = torch.tensor([[True]])
    batch = PolicyBatch(
        logprobs=torch.zeros(1, 1), old_logprobs=torch.zeros(1, 1), advantages=torch.ones(1, 1), mask=mask
    )
    with pytest.raises(ValueError, match="has no reference_logprobs"):
        policy_loss(batch, GrpoSpec.model_validate({"kl": {"weight": 0.1}}), count_normaliser(mask, 1))


def test_entropy_bonus_without_entropy_is_refused() -> None:
    mask = torch.tensor([[True]])
    batch = PolicyBatch(
        logprobs=torch.zeros(1, 1), old_logprobs=torch.zeros(1, 1), advantages=torch.ones(1, 1), mask=mask
    )
    with pytest.raises(ValueError, match="has no entropy"):
        policy_loss(batch, GrpoSpec(entropy_weight=0.1), count_normaliser(mask, 1))


def test_entropy_bonus_lowers_the_loss_by_weight_times_mean_entropy() -> None:
    mask = torch.tensor([[True, True]])
    batch = PolicyBatch(
        logprobs=torch.zeros(1, 2), old_logprobs=torch.zeros(1, 2), advantages=torch.zeros(1, 1), mask=mask,
        entropy=torch.tensor([[1.0, 3.0]]),
    )  # fmt: skip
    result = policy_loss(batch, GrpoSpec(entropy_weight=0.5), count_normaliser(mask, 2))
    assert result.loss.item() == pytest.approx(-1.0)
    assert result.sums["entropy"] == 4.0


def test_value_loss_takes_the_larger_of_clipped_and_unclipped_error() -> None:
    # value 2, old 0, clip 0.5, target 1: unclipped error 1, clipped (0.5 - 1)^2; half of 1.
    mask = torch.tensor([[True, False]])
    loss = value_loss(
        torch.tensor([[2.0, float("nan")]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]), mask,
        count_normaliser(mask, 1), 0.5,
    )  # fmt: skip
    assert loss.item() == 0.5
