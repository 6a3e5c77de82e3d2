"""What a plan says of a training engine, in the engine's own options."""

from __future__ import annotations

from plans.plan import PipelineStage, Replica, TaskPlan
from stages.spec.job import TrainingJob, load_training_job
from stages.training_launch import CRITIC_ENGINE, trainer_options

PLACED = TaskPlan(
    dp=2, pp=2, tp=1,
    replicas=tuple(
        Replica(
            samples=samples,
            stages=(PipelineStage(layers=20, gpus=(f"m/{first}",)), PipelineStage(layers=8, gpus=(f"m/{first + 1}",))),
        )
        for samples, first in ((10, 2), (5, 0))
    ),
)  # fmt: skip


def job(engine: str, options: str = "{}") -> TrainingJob:
    return load_training_job(
        f"""
format: motley.job/1
name: j
algorithm: grpo
seed: 7
models: {{actor: {{shape: qwen3-0.6b}}, reference: {{shape: qwen3-0.6b}}, reward: {{verifier: math}}}}
batch: {{prompts: 5, responses_per_prompt: 3}}
lengths: {{prompt: 8, response: 8}}
source: {{type: hf, path: some/model}}
data: {{source: "arithmetic:addition"}}
rewards: {{terms: [{{name: math_verify}}]}}
engines: {{training: {{name: {engine}, options: {options}}}}}
""",
        "job",
    )


def test_megatron_gets_degrees_layers_and_samples_of_the_plan_beside_the_authors_options() -> None:
    chosen = job("megatron", "{sequence_parallel: true, tensor_parallel: 9}")

    assert trainer_options(chosen, "megatron", PLACED, num_processes=2) == {
        "precision": chosen.planner.training.precision.value,
        "recompute": chosen.planner.training.recompute.value,
        "seed": 7,
        "sequence_parallel": True,
        "tensor_parallel": 1,
        "stage_layers": [20, 8],
        "replica_samples": [10, 5],
    }


def test_accelerate_gets_a_number_of_processes() -> None:
    options = trainer_options(job("accelerate", "{rank_timeout_s: 60.0}"), "accelerate", PLACED, num_processes=2)

    assert options["num_processes"] == 2
    assert options["rank_timeout_s"] == 60.0
    assert "stage_layers" not in options


def test_critic_beside_a_megatron_policy_gets_none_of_its_options() -> None:
    options = trainer_options(job("megatron", "{sequence_parallel: true}"), CRITIC_ENGINE, PLACED, num_processes=1)

    assert sorted(options) == ["num_processes", "precision", "recompute", "seed"]
