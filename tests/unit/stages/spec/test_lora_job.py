"""LoRA in a job: what the section becomes, and which faults are named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from stages.errors import SpecFaultsError
from stages.spec.execution import LORA_TARGETS
from stages.spec.job import TrainingJob, load_training_job, training_job_from_document

ADDITION = (Path(__file__).parents[4] / "tests" / "helpers" / "addition" / "job.yaml").read_text()
TRAINING = "  training: {name: accelerate}"
FINGERPRINT_WITHOUT = "d5836ab045f6b5b9e96f5cb27315f63b1eea0708c7545a5307145732fb187673"
"""Of the addition job, from before jobs could have the section."""


def job_with(lora: str, engine: str = "accelerate") -> TrainingJob:
    assert TRAINING in ADDITION
    return load_training_job(ADDITION.replace(TRAINING, f"  training: {{name: {engine}, lora: {lora}}}"), "job.yaml")


def faults_of(lora: str, engine: str = "accelerate") -> list[str]:
    with pytest.raises(SpecFaultsError) as caught:
        job_with(lora, engine)
    return list(caught.value.faults)


def test_section_has_defaults_and_reads_back() -> None:
    job = job_with("{rank: 8}")
    lora = job.engines.training.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.dropout, lora.target_modules, lora.scaling) == (8, 32.0, 0.0, LORA_TARGETS, 4.0)
    again = training_job_from_document(json.loads(json.dumps(job.to_document())), "run.json")
    assert (again, again.fingerprint) == (job, job.fingerprint)


def test_example_of_the_cookbook_is_a_job() -> None:
    text = (Path(__file__).parents[4] / "docs" / "cookbook.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "lora" in block]
    document = {**yaml.safe_load(ADDITION), **yaml.safe_load(block)}
    job = training_job_from_document(document, "cookbook")
    assert (job.optimizer.learning_rate, job.engines.training.lora is None) == (1e-4, False)


def test_targets_are_a_set() -> None:
    one, other = (job_with(f"{{target_modules: [{names}]}}") for names in ("v_proj, q_proj", "q_proj, v_proj, q_proj"))
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != job_with("{}").fingerprint


def test_runs_without_the_section_keep_their_fingerprint() -> None:
    """A run that began before the section existed still resumes."""
    assert load_training_job(ADDITION, "job.yaml").fingerprint == FINGERPRINT_WITHOUT
    assert job_with("null").fingerprint == FINGERPRINT_WITHOUT
    assert job_with("{}").fingerprint != FINGERPRINT_WITHOUT


@pytest.mark.parametrize(
    ("lora", "engine", "fault"),
    [
        ("{dropout: 0.1}", "accelerate", "engines.training.lora.dropout: 0.1 would make the log-probs of two passes"),
        ("{rank: 0}", "accelerate", "engines.training.lora.rank is 0, but input should be greater than or equal to 1"),
        ("{rank: 65}", "accelerate", "engines.training.lora.rank is 65, but the smallest side of an adapted layer"),
        ("{rank: 129, target_modules: [up_proj]}", "accelerate", "engines.training.lora.rank is 129, but the smallest"),
        ("{target_modules: []}", "accelerate", "engines.training.lora.target_modules: empty, so nothing would"),
        ("{target_modules: [lm_head]}", "accelerate", 'engines.training.lora.target_modules[0] is "lm_head", but'),
        ("{ranks: 8}", "accelerate", "engines.training.lora.ranks is given, but this format has no such field"),
        ("{}", "megatron", "engines.training.lora is given, but engine megatron trains whole weights only"),
    ],
)
def test_fault_is_named(lora: str, engine: str, fault: str) -> None:
    assert any(found.startswith(fault) for found in faults_of(lora, engine)), faults_of(lora, engine)


def test_faults_come_with_all_others_of_the_file() -> None:
    text = ADDITION.replace(TRAINING, "  training: {name: megatron, lora: {rank: 400}}")
    text = text.replace("num_mini_batches: 1", "num_mini_batches: 3")
    with pytest.raises(SpecFaultsError) as caught:
        load_training_job(text, "job.yaml")
    assert len(caught.value.faults) == 3


def test_rank_of_mlp_layers_may_exceed_the_width_of_keys() -> None:
    assert job_with("{rank: 100, target_modules: [up_proj, down_proj]}").engines.training.lora is not None
