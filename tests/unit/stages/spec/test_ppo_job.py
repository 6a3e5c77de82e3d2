"""PPO jobs: what a document becomes, and which faults are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.errors import SpecFaultsError
from stages.spec.job import TrainingJob, load_training_job, training_job_from_document

EXAMPLE = Path(__file__).parents[4] / "examples" / "ppo-quickstart" / "job.yaml"


def document(**changes: Any) -> dict[str, Any]:
    """The example with top-level sections replaced; None removes one."""
    content: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    merged = {**content, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def models(**changes: Any) -> dict[str, Any]:
    return {**document()["models"], **changes}


def faults(**changes: Any) -> list[str]:
    with pytest.raises(SpecFaultsError) as raised:
        training_job_from_document(document(**changes), "job.yaml")
    return list(raised.value.faults)


def example() -> TrainingJob:
    return load_training_job(EXAMPLE.read_text(), str(EXAMPLE))


def test_ppo_section_gives_policy_loss_steps_and_reference() -> None:
    job = example()
    assert (job.grpo.loss, job.grpo.kl.weight, job.kl.weight) == ("ppo", 0.0, 0.02)
    assert job.needs_reference
    # 8 mini-batches in each of 4 epochs.
    assert job.planner.training.updates_per_iteration == job.optimizer_steps_per_iteration == 32


def test_ppo_job_survives_its_own_document() -> None:
    job = example()
    again = training_job_from_document(job.to_document(), "again")
    assert again == job
    assert again.fingerprint == job.fingerprint


def test_ppo_without_a_section_takes_the_published_values() -> None:
    job = training_job_from_document(document(ppo=None), "job.yaml")
    assert job.ppo is not None
    assert (job.ppo.gae_lambda, job.ppo.value_clip, job.grpo.loss_aggregation) == (0.95, 0.2, "token_mean")


def test_one_response_per_prompt_is_enough_for_ppo() -> None:
    job = training_job_from_document(document(batch={"prompts": 512, "responses_per_prompt": 1}), "job.yaml")
    assert job.responses_per_prompt == 1


def test_options_in_both_sections_are_refused() -> None:
    assert "grpo is given beside ppo" in faults(grpo={"clip_low": 0.1})[0]


def test_critic_of_another_vocabulary_is_named() -> None:
    shape = {**document()["models"]["critic"]["shape"], "vocab": 17}
    found = faults(models=models(critic={"shape": shape}))
    assert found == [
        "models.critic.shape.vocab is 17, but models.actor.shape.vocab is 16: the critic reads the actor's token ids; "
        "use a critic of the actor's vocabulary."
    ]


def test_critic_of_another_shape_needs_weights_of_its_own() -> None:
    shape = {**document()["models"]["critic"]["shape"], "layers": 2}
    assert (
        "a critic without a path starts from the actor's weights" in faults(models=models(critic={"shape": shape}))[0]
    )
    training_job_from_document(document(models=models(critic={"shape": shape, "path": "/m"})), "job.yaml")


def test_reward_model_without_path_weight_or_the_actors_vocabulary_is_named_in_full() -> None:
    shape = {**document()["models"]["critic"]["shape"], "vocab": 99}
    found = faults(models=models(reward={"shape": shape}))
    assert [text.split(",")[0].split(";")[0] for text in found] == [
        "models.reward is a model",
        "models.reward has no path",
        "models.reward.shape.vocab is 99",
    ]


def test_reward_model_alone_needs_no_rule() -> None:
    shape = document()["models"]["critic"]["shape"]
    job = training_job_from_document(
        document(models=models(reward={"shape": shape, "path": "/rm"}), rewards={"reward_model": {"weight": 0.5}}), "j"
    )
    assert job.reward_model is not None
    assert job.rewards.terms == ()


def test_score_of_no_model_is_refused() -> None:
    found = faults(rewards={"terms": [{"name": "exact_answer"}], "reward_model": {"weight": 1.0}})
    assert "rewards.reward_model is given, but models.reward is a rule" in found[0]


def test_nothing_that_rewards_is_refused() -> None:
    assert "so nothing is rewarded" in faults(rewards={"terms": []})[0]


def test_warm_up_as_long_as_the_run_is_refused() -> None:
    ppo = {**document()["ppo"], "critic_warm_up_iterations": 12}
    assert "the policy would never be trained" in faults(ppo=ppo)[0]


def test_paths_of_critic_and_reward_model_are_part_of_what_a_run_is() -> None:
    shape = document()["models"]["critic"]["shape"]
    prints = {
        training_job_from_document(document(models=models(critic={"shape": shape, "path": path})), "j").fingerprint
        for path in (None, "/a", "/b")
    }
    assert len(prints) == 3
