"""Losses, gradients and advantages equal those that TRL and verl compute (see make_peer_goldens.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from stages.rl.advantages import estimate_advantages  # noqa: E402 - needs torch's presence checked first
from stages.rl.aggregation import count_normaliser  # noqa: E402
from stages.rl.gae import gae  # noqa: E402
from stages.rl.kl import kl_per_token  # noqa: E402
from stages.rl.losses import PolicyBatch, policy_loss  # noqa: E402
from stages.rl.spec import AdvantageSpec, GrpoSpec  # noqa: E402
from stages.rl.token_targets import TokenBatch, token_targets  # noqa: E402
from stages.rl.value_loss import value_loss  # noqa: E402

pytestmark = pytest.mark.engines

GOLDENS = json.loads(Path(__file__).with_name("peer_goldens.json").read_text())
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}


def our_spec(case: dict) -> GrpoSpec:
    options = case["options"]
    if case["peer"] == "trl":
        loss = "gspo" if options["level"] == "sequence" else options["loss_type"]
        return GrpoSpec(loss=loss, clip_low=options["low"], clip_high=options["high"], kl={"weight": options["beta"]})
    return GrpoSpec(
        loss="gspo" if options["loss_type"] == "gspo" else "grpo",
        clip_low=options["low"],
        clip_high=options["high"],
        # verl's GSPO has no dual clip.
        dual_clip=None if options["loss_type"] == "gspo" else options["dual"],
        loss_aggregation=AGGREGATIONS[options["aggregation"]],
    )


@pytest.mark.parametrize("case", GOLDENS["losses"], ids=lambda case: f"{case['peer']}-{json.dumps(case['options'])}")
def test_policy_loss_on_random_input_equals_the_peers_loss_and_gradient(case: dict) -> None:
    inputs = {name: torch.tensor(values) for name, values in case["inputs"].items()}
    logprobs = inputs["logprobs"].requires_grad_()
    mask = inputs["mask"].bool()
    batch = PolicyBatch(
        logprobs=logprobs,
        old_logprobs=inputs["old_logprobs"],
        advantages=inputs["advantages"],
        mask=mask,
        reference_logprobs=inputs["reference_logprobs"],
        correction_weights=inputs["correction_weights"] if case["options"]["is"] else None,
    )
    result = policy_loss(batch, our_spec(case), count_normaliser(mask, GOLDENS["max_response_tokens"]))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(logprobs.grad, torch.tensor(case["gradient"]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "spec"),
    [
        ("std", AdvantageSpec(normalisation="std", eps=1e-6)),
        ("none", AdvantageSpec(normalisation="none")),
        ("rloo", AdvantageSpec(estimator="rloo", normalisation="none")),
    ],
)
def test_advantages_of_interleaved_groups_equal_those_of_verl(key: str, spec: AdvantageSpec) -> None:
    case = GOLDENS["verl_advantages"]
    rewards = np.array(case["rewards"])
    ours = estimate_advantages(rewards, np.ones(rewards.size, bool), case["groups"], spec)
    np.testing.assert_allclose(ours.values, case[key], rtol=1e-5, atol=1e-6)


def reinforce_pp(key: str, spec: AdvantageSpec, kl_weight: float) -> np.ndarray:
    case = GOLDENS["verl_reinforce_pp"]
    scores = np.array(case["scores"])
    rewards = estimate_advantages(scores, np.ones(scores.size, bool), case["groups"], spec).values
    policy = [np.array(row[:length]) for row, length in zip(case["kl"], case["lengths"], strict=True)]
    batch = TokenBatch(
        rewards=rewards, kept=np.ones(scores.size, bool), policy_logprobs=policy,
        reference_logprobs=[np.zeros(length) for length in case["lengths"]],
    )  # fmt: skip
    found = token_targets(batch, discount=1.0, gae_lambda=1.0, kl_estimator="k1", kl_weight=kl_weight, is_whitened=True)
    # verl divides by the sample deviation (n - 1), we by that of the tokens themselves (n), as the paper writes it.
    num_tokens = found.mask.sum()
    np.testing.assert_allclose(
        found.advantages * ((num_tokens - 1) / num_tokens) ** 0.5, case[key], rtol=1e-6, atol=1e-7
    )
    return found.advantages


def test_reinforce_pp_advantages_with_penalty_in_the_reward_equal_those_of_verl() -> None:
    found = reinforce_pp("plain", AdvantageSpec(estimator="reinforce_pp", normalisation="none"), kl_weight=0.5)
    assert len({round(float(value), 9) for value in found[3]}) == 6  # every token its own


def test_reinforce_pp_baseline_advantages_equal_those_of_verl() -> None:
    found = reinforce_pp(
        "baseline", AdvantageSpec(estimator="reinforce_pp_baseline", normalisation="none"), kl_weight=0.0
    )
    assert len({round(float(value), 9) for value in found[3]}) == 1


@pytest.mark.parametrize(("scale", "normalisation"), [("group", "std"), ("none", "none"), ("batch", "batch_std")])
def test_advantages_with_a_missing_reward_equal_those_of_trl(scale: str, normalisation: str) -> None:
    case = GOLDENS["trl_advantages"][scale]
    valid = np.array([reward is not None for reward in case["rewards"]])
    rewards = np.array([np.nan if reward is None else reward for reward in case["rewards"]])
    ours = estimate_advantages(rewards, valid, case["groups"], AdvantageSpec(normalisation=normalisation))
    np.testing.assert_allclose(ours.values, case["advantages"], rtol=1e-5, atol=1e-6)


def test_gae_returns_over_a_broken_mask_equal_those_of_verl() -> None:
    case = {name: np.array(values) for name, values in GOLDENS["verl_gae"].items()}
    ours = gae(case["rewards"], case["values"], case["mask"] > 0, discount=0.97, gae_lambda=0.9)
    np.testing.assert_allclose(ours.returns, case["returns"], rtol=1e-9, atol=1e-12)


def test_value_loss_with_clipping_equals_that_of_verl() -> None:
    case = {name: torch.tensor(values) for name, values in GOLDENS["verl_value_loss"].items()}
    mask = case["mask"].bool()
    ours = value_loss(case["values"], case["old"], case["returns"], mask, count_normaliser(mask, 1), clip=0.2)
    torch.testing.assert_close(ours, case["loss"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_straight_through"])
def test_kl_estimator_and_its_gradient_equal_those_of_verl(estimator: str) -> None:
    case = GOLDENS["verl_kl"]
    logprobs = torch.tensor(case["logprobs"]).requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    ours = kl_per_token(logprobs, torch.tensor(case["reference_logprobs"]), mask, estimator)
    ours.sum().backward()
    torch.testing.assert_close(ours, torch.tensor(case[estimator]["values"]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(logprobs.grad, torch.tensor(case[estimator]["gradient"]), rtol=1e-4, atol=1e-6)
