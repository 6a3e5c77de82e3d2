"""Spec sections of the numerics."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec, PpoSpec, sampling_faults
from stages.rl.variants.registry import VARIANTS


def test_variant_fills_the_published_values_that_the_author_left_out() -> None:
    dapo, dr_grpo, gspo = GrpoSpec(loss="dapo"), GrpoSpec(loss="dr_grpo"), GrpoSpec(loss="gspo")
    assert (dapo.clip_low, dapo.clip_high, dapo.loss_aggregation) == (0.2, 0.28, "token_mean")
    assert (dr_grpo.advantage.normalisation, dr_grpo.loss_aggregation) == ("none", "sequence_mean_token_sum_norm")
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)


def test_authors_value_beats_the_variants() -> None:
    assert GrpoSpec(loss="dapo", clip_high=0.5).clip_high == 0.5


@pytest.mark.parametrize("loss", sorted(VARIANTS))
def test_spec_survives_json(loss: str) -> None:
    spec = GrpoSpec.model_validate({"loss": loss})
    assert GrpoSpec.model_validate_json(spec.model_dump_json()) == spec


def test_all_faults_of_a_section_are_reported_together() -> None:
    with pytest.raises(ValidationError, match="3 validation errors") as raised:
        GrpoSpec.model_validate({"clip_low": 1.5, "dual_clip": 0.5, "clip_hihg": 1})
    assert {error["loc"] for error in raised.value.errors()} == {("clip_low",), ("dual_clip",), ("clip_hihg",)}


def test_floor_without_mask_mode_is_refused() -> None:
    with pytest.raises(ValidationError, match="use mode: mask"):
        CorrectionSpec(mode="truncate", floor=0.5)


def test_l3_truncated_sampling_with_correction_is_refused() -> None:
    faults = sampling_faults(CorrectionSpec(), top_p=0.9, top_k=0)
    assert len(faults) == 1
    assert "top_p 0.9 truncates the distribution" in faults[0]


def test_truncated_sampling_without_correction_is_allowed() -> None:
    assert sampling_faults(CorrectionSpec(mode="none"), top_p=0.9, top_k=5) == []
    assert sampling_faults(CorrectionSpec(), top_p=1.0, top_k=0) == []


def test_unknown_variant_is_named_with_those_there_are() -> None:
    with pytest.raises(ValidationError, match="loss 'gpro' is unknown; it is one of grpo, dr_grpo, dapo, gspo"):
        GrpoSpec.model_validate({"loss": "gpro"})


def test_ppo_gives_the_policy_its_options_and_keeps_a_penalty_in_the_reward_out_of_the_loss() -> None:
    spec = PpoSpec.model_validate({"clip_high": 0.3, "kl": {"weight": 0.1}, "num_epochs": 2})
    policy = spec.policy()
    assert (spec.kl.place, spec.kl.estimator) == ("reward", "k1")
    assert (policy.loss, policy.ratio, policy.clip_high, policy.kl.weight, policy.num_epochs) == (
        "ppo", "token", 0.3, 0.0, 2,
    )  # fmt: skip
    in_loss = PpoSpec.model_validate({"kl": {"weight": 0.1, "place": "loss"}})
    assert (in_loss.kl.estimator, in_loss.policy().kl.weight) == ("k3", 0.1)


def test_adaptive_penalty_needs_a_first_weight() -> None:
    with pytest.raises(ValidationError, match="stays 0 however it is multiplied"):
        PpoSpec.model_validate({"kl": {"target": 1.0}})


def test_gradient_estimator_in_the_reward_is_refused() -> None:
    with pytest.raises(ValidationError, match="a reward has none"):
        PpoSpec.model_validate({"kl": {"estimator": "k3_straight_through", "weight": 0.1}})
