"""Off-policy corrections by name: values derived by hand, and what each does to the loss and its gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pydantic import ValidationError  # noqa: E402 - after the check for torch

from stages.rl.aggregation import count_normaliser  # noqa: E402
from stages.rl.correction_spec import CorrectionSpec, RejectionSpec  # noqa: E402
from stages.rl.importance import importance_correction, rejected_rows  # noqa: E402
from stages.rl.losses import PolicyBatch, policy_loss  # noqa: E402
from stages.rl.spec import GrpoSpec  # noqa: E402

pytestmark = pytest.mark.engines

RATIOS = [[4.0, 1.0, 0.25, 8.0], [1.0, 1.5, 1.0, 1.0]]
"""Proximal over behaviour probability of each token; the last token of the first row is padding."""
MASK = [[True, True, True, False], [True, True, True, True]]


def correction_of(spec: CorrectionSpec) -> Any:
    ratios = torch.tensor(RATIOS)
    return importance_correction(ratios.log(), torch.zeros(2, 4), torch.tensor(MASK), spec)


FIRST_MEAN = math.exp((math.log(4) + math.log(1) + math.log(0.25)) / 3)  # = 1: the product is 1
SECOND_MEAN = math.exp(math.log(1.5) / 4)  # = 1.10668


@pytest.mark.parametrize(
    ("name", "weights", "num_counted"),
    [
        ("truncated_token", [[2, 1, 0.25, 0], [1, 1.5, 1, 1]], 7),
        ("truncated_sequence", [[FIRST_MEAN] * 3 + [0], [SECOND_MEAN] * 4], 7),
        ("masked_token", [[0, 1, 0, 0], [1, 1.5, 1, 1]], 5),
        ("masked_sequence", [[FIRST_MEAN] * 3 + [0], [SECOND_MEAN] * 4], 7),
        ("decoupled_ppo", [[4, 1, 0.25, 0], [1, 1.5, 1, 1]], 7),
        ("none", [[1, 1, 1, 0], [1, 1, 1, 1]], 7),
        ("behaviour_ppo", [[1, 1, 1, 0], [1, 1, 1, 1]], 7),
    ],
)
def test_named_correction_has_the_weights_of_its_form(name: Any, weights: list[list[float]], num_counted: int) -> None:
    result = correction_of(CorrectionSpec(name=name))

    torch.testing.assert_close(result.weights, torch.tensor(weights, dtype=torch.float32))
    assert count_normaliser(result.mask, 4).num_tokens == num_counted


def test_decoupled_ppo_rejects_far_tokens_and_keeps_them_in_the_denominator() -> None:
    """AReaL counts with the mask from before the rejection."""
    spec = CorrectionSpec(name="decoupled_ppo", cap=2.0)
    result = correction_of(spec)

    torch.testing.assert_close(result.weights[0], torch.tensor([0.0, 1.0, 0.25, 0.0]))
    assert count_normaliser(result.mask, 4).num_tokens == 7
    assert (result.stats.num_zero, result.stats.zero_fraction) == (1, pytest.approx(1 / 7))
    assert not spec.changes_counts


def test_response_far_from_the_sampler_is_left_out_whole() -> None:
    """L4: the masked form; what is left counts one of two responses."""
    far = torch.stack([torch.full((50,), 2.0), torch.zeros(50)])
    mask = torch.ones(2, 50, dtype=torch.bool)
    result = importance_correction(far, torch.zeros(2, 50), mask, CorrectionSpec(name="masked_sequence"))

    assert result.weights.sum(dim=1).tolist() == [0.0, 50.0]
    assert (result.stats.effective_sample_size, result.stats.zero_fraction) == (pytest.approx(1.0), 0.5)


def test_effective_sample_size_is_kishs() -> None:
    stats = correction_of(CorrectionSpec(name="truncated_token")).stats
    # Weights 2, 1, 0.25, 1, 1.5, 1, 1: sum 7.75, sum of squares 10.3125.
    assert stats.effective_sample_size == pytest.approx(7.75**2 / 10.3125, rel=1e-6)
    assert stats.effective_sample_fraction == pytest.approx(7.75**2 / 10.3125 / 7, rel=1e-6)


@pytest.mark.parametrize(
    ("estimator", "aggregate", "values"),
    [
        # x = log 4, 0, -log 4 and 0, log 1.5, 0, 0.
        ("k1", "mean", [0.0, -math.log(1.5) / 4]),
        ("k1", "max", [math.log(4), math.log(1.5)]),
        ("k2", "mean", [math.log(4) ** 2 / 3, math.log(1.5) ** 2 / 8]),
        ("k2", "max", [math.log(4) ** 2 / 2, math.log(1.5) ** 2 / 2]),
        ("k3", "mean", [(4 - 1 - math.log(4) + 0.25 - 1 + math.log(4)) / 3, (0.5 - math.log(1.5)) / 4]),
        ("k3", "max", [3 - math.log(4), 0.5 - math.log(1.5)]),
    ],
)
def test_response_is_rejected_above_the_limit_and_not_at_it(
    estimator: Any, aggregate: Any, values: list[float]
) -> None:
    log_ratio, mask = torch.tensor(RATIOS).log(), torch.tensor(MASK)
    for row, value in enumerate(values):
        if value > 0.0:
            above = RejectionSpec(estimator=estimator, aggregate=aggregate, limit=value * 0.999)
            below = RejectionSpec(estimator=estimator, aggregate=aggregate, limit=value * 1.001)
            assert bool(rejected_rows(log_ratio, mask, above)[row])
            assert not bool(rejected_rows(log_ratio, mask, below)[row])
        else:
            tiny = RejectionSpec(estimator=estimator, aggregate=aggregate, limit=1e-6)
            assert not bool(rejected_rows(log_ratio, mask, tiny)[row])


@pytest.mark.parametrize(("denominator", "num_counted"), [("kept", 4), ("all", 7)])
def test_rejected_response_weighs_nothing(denominator: Any, num_counted: int) -> None:
    reject = RejectionSpec(estimator="k3", aggregate="max", limit=1.0)  # the first row's maximum is 1.61
    result = correction_of(CorrectionSpec(name="none", reject=reject, denominator=denominator))

    torch.testing.assert_close(result.weights, torch.tensor([[0.0] * 4, [1.0] * 4]))
    assert count_normaliser(result.mask, 4).num_tokens == num_counted


def gradient(spec: CorrectionSpec, current: list[float], proximal: list[float], behaviour: list[float]) -> list[float]:
    """Gradient of the loss by the current log-probs, of one response with advantage 1 (token mean)."""
    logprobs = torch.tensor([current], requires_grad=True)
    start, sampler = torch.tensor([proximal]), torch.tensor([behaviour])
    mask = torch.ones(1, len(current), dtype=torch.bool)
    correction = importance_correction(start, sampler, mask, spec)
    batch = PolicyBatch(
        logprobs=logprobs,
        old_logprobs=sampler if spec.clip_around == "behaviour" else start,
        advantages=torch.ones(1, 1),
        mask=correction.mask,
        correction_weights=correction.weights,
    )
    normaliser = count_normaliser(correction.mask, len(current))
    policy_loss(batch, GrpoSpec(loss="dapo"), normaliser).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad[0].tolist()


def test_decoupled_gradient_clips_around_the_proximal_policy_and_weighs_by_the_behaviour() -> None:
    """-d/dx [w min(r, 1.28)] with r = current / proximal, w = proximal / behaviour; two tokens, so halved."""
    proximal, behaviour = [-1.0, -1.0], [-1.0 - math.log(1.5), -1.0]
    current = [-1.0 + math.log(1.1), -1.0 + math.log(1.4)]

    # Token 0: r = 1.1 inside the clip, w = 1.5. Token 1: r = 1.4 beyond 1.28: no gradient.
    assert gradient(CorrectionSpec(name="decoupled_ppo"), current, proximal, behaviour) == pytest.approx(
        [-1.1 * 1.5 / 2, 0.0]
    )


def test_behaviour_gradient_has_one_ratio() -> None:
    """Token 0: current / behaviour = 1.65 is clipped although current / proximal is not; token 1: 1.1 is not."""
    proximal, behaviour = [-1.0, -1.0], [-1.0 - math.log(1.5), -1.0]
    current = [-1.0 + math.log(1.1), -1.0 + math.log(1.1)]

    assert gradient(CorrectionSpec(name="behaviour_ppo"), current, proximal, behaviour) == pytest.approx([0.0, -0.55])


def test_named_corrections_agree_when_the_policies_do() -> None:
    """On policy every form is plain policy gradient: weight 1, nothing masked."""
    same = [-1.0, -2.0]
    names: list[Any] = [
        "truncated_token", "truncated_sequence", "masked_token", "masked_sequence", "decoupled_ppo", "behaviour_ppo",
        "none",
    ]  # fmt: skip
    for name in names:
        assert gradient(CorrectionSpec(name=name), same, same, same) == pytest.approx([-0.5, -0.5])


def test_spec_holds_the_numbers_in_force_and_round_trips() -> None:
    spec = CorrectionSpec.model_validate({"name": "decoupled_ppo", "cap": 3.0})

    assert (spec.mode, spec.cap, spec.denominator) == ("mask", 3.0, "all")
    assert CorrectionSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert CorrectionSpec.model_validate({"name": "masked_token", "mode": "truncate"}).floor == 0.0


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"name": "behaviour_ppo", "mode": "truncate"}, "would count the ratio of proximal to behaviour policy twice"),
        ({"floor": 0.5}, "has no lower bound; use mode: mask"),
        ({"name": "vtrace"}, "truncated_token"),
        ({"reject": {"limit": 0.0}}, "greater than 0"),
        ({"reject": {"limit": 1.0, "aggregate": "sum"}}, "'mean' or 'max'"),
    ],
)
def test_correction_that_makes_no_sense_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorrectionSpec.model_validate(document)
