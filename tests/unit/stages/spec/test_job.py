from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stages.errors import SpecFaultsError
from stages.spec.job import TrainingJob, load_training_job, training_job_from_document

ADDITION = (Path(__file__).parents[4] / "tests" / "helpers" / "addition" / "job.yaml").read_text()


def addition(*changes: tuple[str, str]) -> str:
    text = ADDITION
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def faults_of(text: str) -> list[str]:
    with pytest.raises(SpecFaultsError) as caught:
        load_training_job(text, "job.yaml")
    return caught.value.faults


def test_addition_job_loads_with_the_recipe() -> None:
    job = load_training_job(ADDITION, "job.yaml")

    assert job.planner.models.actor.llm.parameters == 789_632
    assert (job.optimizer.learning_rate, job.optimizer.warm_up_steps) == (3e-4, 10)
    assert (job.grpo.loss_aggregation, job.grpo.kl.weight, job.sampling.temperature) == ("token_mean", 0.0, 1.0)
    assert (job.prompts_per_shard, job.optimizer_steps_per_iteration, job.needs_reference) == (32, 1, False)
    assert job.data.max_prompt_tokens == 7  # taken from lengths.prompt


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], 0.01),
        ([("dtype: fp32", "dtype: bf16")], 0.1),
        ([("dtype: fp32", "dtype: fp32, dtype_on: {local: bf16}")], 0.1),
        ([("precision: fp32", "precision: bf16-mixed")], 0.1),
        ([("{name: accelerate}", "{name: accelerate, options: {serving_dtype: bf16}}")], 0.1),
        ([("{name: accelerate}", "{name: accelerate, options: {serving_dtype: null}}")], 0.01),
        ([("dtype: fp32", "dtype: bf16"), ("iterations: 40", "limits: {canary_max_logprob_gap: 0.03}")], 0.03),
    ],
)
def test_canary_allows_what_the_numeric_types_make(changes: list[tuple[str, str]], expected: float) -> None:
    """Served weights of SmolLM2-135M in bf16 alone are 0.016 nats from their trainer: no fault of the engine."""
    assert load_training_job(addition(*changes), "job.yaml").canary_max_gap == expected


def test_job_document_reads_back_as_an_equal_job() -> None:
    job = load_training_job(ADDITION, "job.yaml")

    again = training_job_from_document(json.loads(json.dumps(job.to_document())), "run.json")

    assert again == job
    assert again.fingerprint == job.fingerprint


def test_null_that_differs_from_the_default_survives_the_document() -> None:
    job = load_training_job(addition(("warm_up: {target_score: 0.25}", "warm_up: null")), "job.yaml")

    assert training_job_from_document(json.loads(json.dumps(job.to_document())), "run.json") == job


def test_value_that_json_does_not_have_hides_no_other_fault() -> None:
    text = addition(
        ("learning_rate: 3.0e-4", "learning_rate: .nan"),
        ("seed: 0", "seed: -1"),
        ("prompts: 64, responses_per_prompt: 8", "prompts: .inf, responses_per_prompt: 8"),
        ("evaluation: {every: 10,", "evaluation: {evry: 10,"),
    )
    assert sorted(faults_of(text)) == sorted(
        [
            "optimizer.learning_rate is nan, but numbers are finite; write a finite number.",
            "batch.prompts is inf, but numbers are finite; write a finite number.",
            "seed is -1, but input should be greater than or equal to 0; write an allowed value.",
            "evaluation.evry is given, but this format has no such field; write 'every', or remove the field.",
        ]
    )


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("sampling: {temperature", "sampling: {temprature", "sampling.temprature is given, .* write 'temperature'"),
        ("type: init", "type: init\n  tokeniser: characters", "source.tokeniser is given, .* write 'tokenizer'"),
        ("warm_up: {target_score", "warm_up: {target", "source.warm_up.target is given, .* write 'target_score'"),
        (
            "- name: exact_answer",
            "- name: exact_answer\n      wieght: 2",
            r"terms\[0\].wieght is given, .* write 'weight'",
        ),
        ("seed: 0", "seed: 0\noptimiser: {}", "optimiser is given, .* write 'optimizer'"),
    ],
)
def test_an_unknown_field_comes_with_the_nearest_name_that_is_allowed_there(old: str, new: str, fault: str) -> None:
    faults = faults_of(addition((old, new)))
    assert any(re.search(fault, found) for found in faults), faults


def test_an_unknown_reward_and_its_options_are_reported_with_all_other_faults() -> None:
    terms = "- name: exact_answr\n    - name: format\n      label: form\n      options: {pattern: '('}"
    faults = faults_of(addition(("- name: exact_answer", terms), ("seed: 0", "seed: -1")))
    assert faults[0].startswith("seed is -1")
    assert faults[1].startswith("rewards.terms.0.name is 'exact_answr'; known rewards: exact_answer, format")
    assert faults[2].startswith("rewards.terms.1.options.pattern: ")
    assert len(faults) == 3


def test_faults_of_both_parts_and_across_sections_are_reported_together() -> None:
    text = addition(
        ("prompts: 64, responses_per_prompt: 8", "prompts: 63, responses_per_prompt: 1"),
        ("sampling: {temperature: 1.0}", "sampling: {temperature: 1.0, top_p: 0.9}"),
        ("num_mini_batches: 1", "num_mini_batches: 2"),
        ("evaluation: {every: 10,", "evaluation: {evry: 10,"),
        ("seed: 0", "seed: -1"),
        ("lengths: {prompt: 7, response: 4}", "lengths: {prompt: 7, response: 4, respons_mean: 3}"),
    )

    faults = faults_of(text)

    assert [fault.split(" ")[0] for fault in faults[:3]] == ["lengths.respons_mean", "seed", "evaluation.evry"]
    assert len(faults) == 3  # rules across sections wait until the planner's part can be read


def test_rules_across_sections_are_checked_although_an_optional_section_is_faulty() -> None:
    text = addition(
        ("prompts: 64, responses_per_prompt: 8", "prompts: 63, responses_per_prompt: 1"),
        ("sampling: {temperature: 1.0}", "sampling: {temperature: 1.0, top_p: 0.9}"),
        ("num_mini_batches: 1", "num_mini_batches: 2"),
        ("evaluation: {every: 10,", "evaluation: {evry: 10,"),
    )

    faults = faults_of(text)

    assert len(faults) == 4
    assert faults[0].startswith("evaluation.evry is given, but this format has no such field")
    assert faults[1].startswith("batch.prompts is 63, but grpo.num_mini_batches is 2")
    assert faults[2].startswith("batch.responses_per_prompt is 1")
    assert faults[3].startswith("sampling top_p 0.9 truncates the distribution")  # L3


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "algorithm: grpo\nmode: sync\nmodels:",
            "algorithm: ppo\nmode: sync\nmodels:\n  critic: {shape: qwen3-0.6b}",
            "models.critic.shape.vocab is 151936, but models.actor.shape.vocab is 16",
        ),
        ("held_out_fraction: 0.1", "held_out_fraction: 0.0", "data.held_out_fraction is 0 without"),
        ("  held_out_fraction: 0.1", "  max_prompt_tokens: 9\n  held_out_fraction: 0.1", "data.max_prompt_tokens is 9"),
        ("  held_out_fraction: 0.1", "  too_long: drop\n  held_out_fraction: 0.1", "data.too_long is 'drop'"),
        ('alphabet: "0123456789+="', 'alphabet: "0123456789+=-"', "models.actor.shape.vocab is 16"),
        ("verifier: exact_answer", "shape: qwen3-0.6b", "models.reward is a model"),
        ("  num_epochs: 1", "  num_epochs: 1\n  overlong_buffer_tokens: 5", "grpo.overlong_buffer_tokens is 5"),
        ("recompute: none,", "recompute: none, updates_per_iteration: 3,", "training.updates_per_iteration is 3"),
        ("recompute: none,", "recompute: none, sharding: full,", "training.sharding is full, but"),
        ("mode: sync", "mode: async\nmax_staleness: 1\ncorrection: {mode: none}", "correction.mode is none"),
        ("mode: sync", "mode: async\nmax_staleness: 1\ncorrection: {name: none}", "correction.mode is none"),
        ("mode: sync", "mode: async\nmax_staleness: 1\ncorrection: {name: behaviour_ppo}", None),
        ("mode: sync", "mode: async\nmax_staleness: 0", "max_staleness"),
        ("mode: sync", "mode: sync\nasynchrony: {spare_prompts: 1}", "asynchrony.spare_prompts is given, but mode is"),
        ("mode: sync", "mode: sync\nasynchrony: {}", None),
        (
            "mode: sync",
            "mode: async\nmax_staleness: 1\nasynchrony: {generate_ahead: 2}",
            "asynchrony.generate_ahead is 2 with max_staleness 1, but rollouts over the bound are withheld",
        ),
        ("mode: sync", "mode: async\nmax_staleness: 1\nasynchrony: {generate_ahead: 2, spare_prompts: 4}", None),
        ("mode: sync", "mode: async\nmax_staleness: 1\nasynchrony: {generate_ahead: 0}", "asynchrony.generate_ahead"),
        ("    shape: *shape", "    shape: qwen3-0.6b\n  # kl", None),
        ("source:\n  type: init", "source:\n  type: gguf\n  package: x\n  path: y #", "source.architecture"),
    ],
)
def test_rule_across_sections_is_named(old: str, new: str, expected: str | None) -> None:
    text = addition((old, new))

    if expected is None:  # e.g. another reference shape is harmless while nothing needs the reference
        assert isinstance(load_training_job(text, "job.yaml"), TrainingJob)
    else:
        assert any(fault.startswith(expected) for fault in faults_of(text)), faults_of(text)


def test_pacing_and_bound_are_settings_of_their_own() -> None:
    """T11: the depth of the pipeline is not the staleness bound."""
    job = load_training_job(
        addition(("mode: sync", "mode: async\nmax_staleness: 3\nasynchrony: {generate_ahead: 1}")), "job.yaml"
    )
    assert (job.generate_ahead, job.max_staleness, job.prompts_per_iteration) == (1, 3, 64)
    assert load_training_job(addition(("mode: sync", "mode: async\nmax_staleness: 3")), "job.yaml").generate_ahead == 3
    assert load_training_job(addition(), "job.yaml").generate_ahead == 0


def test_kl_weight_needs_the_actor_as_reference() -> None:
    text = addition(("    shape: *shape", "    shape: qwen3-0.6b"), ("  num_epochs: 1", "  kl: {weight: 0.1}"))

    assert faults_of(text) == [
        "models.reference has another shape than models.actor although grpo.kl.weight is 0.1: the reference policy is "
        "policy version 0 of the actor; give both the same shape."
    ]


def test_optimizer_steps_are_told_to_the_planner() -> None:
    job = load_training_job(addition(("num_mini_batches: 1", "num_mini_batches: 4")), "job.yaml")

    assert job.planner.training.updates_per_iteration == 4


def test_spread_weights_are_told_to_the_planner_and_change_no_fingerprint_where_there_are_none() -> None:
    plain = load_training_job(addition(), "job.yaml")
    options = "{name: accelerate, options: {sharding: full}}"
    spread = load_training_job(addition(("{name: accelerate}", options)), "job.yaml")

    assert (plain.planner.training.sharding, spread.planner.training.sharding) == ("none", "full")
    assert plain.planner.fingerprint != spread.planner.fingerprint
    assert "sharding" not in plain.planner._content()["training"]
    document = spread.to_document()
    again = training_job_from_document(json.loads(json.dumps(document)), "run.json")
    assert (again, again.fingerprint) == (spread, spread.fingerprint)
    document["engines"]["training"]["options"] = {}
    assert training_job_from_document(document, "run.json").planner == plain.planner


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("iterations: 40", "iterations: 80"),
        ("every: 10, prompts: 1000", "every: 2, prompts: 100"),
        ("samples_per_shard: 256", "samples_per_shard: 8"),
        ("name: addition", "name: other"),
    ],
)
def test_fingerprint_ignores_what_may_change_when_a_run_goes_on(old: str, new: str) -> None:
    changed = load_training_job(addition((old, new)), "job.yaml")

    assert changed.fingerprint == load_training_job(ADDITION, "job.yaml").fingerprint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 0", "seed: 1"),
        ("learning_rate: 3.0e-4", "learning_rate: 1.0e-4"),
        ("dtype: fp32", "dtype: bf16"),
        ("temperature: 1.0}\noptimizer", "temperature: 0.9}\noptimizer"),
        ("held_out_fraction: 0.1", "held_out_fraction: 0.2"),
    ],
)
def test_fingerprint_covers_what_is_sampled_and_learned(old: str, new: str) -> None:
    changed = load_training_job(addition((old, new)), "job.yaml")

    assert changed.fingerprint != load_training_job(ADDITION, "job.yaml").fingerprint


def test_fingerprint_covers_the_number_of_iterations_when_the_learning_rate_depends_on_it() -> None:
    linear = ("learning_rate: 3.0e-4", "schedule: linear, learning_rate: 3.0e-4")

    first = load_training_job(addition(linear), "job.yaml")
    longer = load_training_job(addition(linear, ("iterations: 40", "iterations: 80")), "job.yaml")

    assert first.fingerprint != longer.fingerprint


def test_unreadable_document_is_one_fault() -> None:
    assert len(faults_of("format: [")) == 1
