"""`motley simulate`: what it prints, draws and refuses. The command runs in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.errors import CommandError, InputError
from cli.simulate import app
from plans.errors import PlanMismatchError, SpecError
from plans.plan import Plan
from plans.spec.load import load_cluster, load_job
from tests.unit.plans.simulate.builders import cluster_of, job_of, one_gpu_each

CLUSTER = """
format: motley.cluster/1
name: unit
gpu_types: {unit: {memory_gb: 1000, tflops: 1, hbm_gb_s: 1000, usd_per_hour: 1}}
machines:
  - {name: m0, region: r, gpu: unit, count: 1}
  - {name: m1, region: r, gpu: unit, count: 1}
links: {same_zone: {latency_ms: 0, bandwidth_gbps: 8}}
"""
JOB = """
format: motley.job/1
name: unit
algorithm: grpo
models:
  actor: {shape: {layers: 4, hidden: 64, intermediate: 128, heads: 4, kv_heads: 4, head_dim: 16, vocab: 100, tied: false}}
  reference: {shape: {layers: 4, hidden: 64, intermediate: 128, heads: 4, kv_heads: 4, head_dim: 16, vocab: 100, tied: false}}
  reward: {verifier: exact}
batch: {prompts: 4, responses_per_prompt: 2}
lengths: {prompt: 16, response: 8}
training: {recompute: none}
"""  # noqa: E501


class Case:
    """The files of a small plan, and the command on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plan_file = folder, folder / "plan.json"
        self.cluster_file, self.job_file = folder / "c.yaml", folder / "j.yaml"
        self.cluster_file.write_text(CLUSTER)
        self.job_file.write_text(JOB)
        self.cluster, self.job = load_cluster(CLUSTER, "c"), load_job(JOB, "j")
        self.write(one_gpu_each(self.cluster, self.job, "m0/0", "m1/0"))

    def write(self, plan: Plan) -> None:
        self.plan_file.write_text(plan.to_json())

    def run(self, *options: str):
        files = ["-c", str(self.cluster_file), "-j", str(self.job_file), "-p", str(self.plan_file)]
        return CliRunner().invoke(app, [*files, *options])

    def seconds(self, *options: str) -> list[float]:
        return json.loads(self.run("--json", *options).stdout)["iteration_s"]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_json_is_one_document_with_the_cost_models_seconds_beside_it(case: Case) -> None:
    result = case.run("--json", "--iterations", "2")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["format"], document["model"]) == (0, "motley.simulation/1", "calibrated")
    assert len(document["iteration_s"]) == 2
    assert document["staleness"] == {"0": 16}
    assert document["predicted_iteration_s"] > 0


def test_hardware_reaches_what_the_model_of_the_same_name_says(case: Case) -> None:
    """Calibrated coefficients are below 1 everywhere, so nothing is as fast as at its peak."""
    peak, calibrated = case.seconds("--model", "paper"), case.seconds()
    assert min(calibrated) > 1.5 * max(peak)
    file = case.folder / "k.yaml"
    file.write_text(
        "format: motley.calibration/1\nlinks: {within_machine: 1, between_machines: 1}\n"
        "default: {compute: {generation: 1, inference: 1, training: 1}, hbm: 1, decode_layer_overhead_s: 0}\n"
    )
    assert case.seconds("--calibration", str(file)) == pytest.approx(peak, rel=1e-12)


def test_stragglers_and_outages_cost_time(case: Case) -> None:
    base = sum(case.seconds())
    assert sum(case.seconds("--straggler", "m0/0=2", "--straggler", "m1/0=2")) > 1.5 * base
    assert sum(case.seconds("--outage", "m0@0+5")) == pytest.approx(base + 5, rel=0.01)


def test_text_says_how_long_how_busy_how_stale(case: Case) -> None:
    text = case.run("--outage", "m0@0.0001+5").stdout
    for words in ("s per iteration", "Busy share", "Staleness", "Outages ended 1", "The calibrated cost model says"):
        assert words in text


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_gantt_picture_is_drawn(case: Case, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = case.folder / f"gantt.{suffix}"
    assert case.run("--picture", str(file)).exit_code == 0
    start = file.read_bytes()[:4000]
    assert b"<svg" in start if suffix == "svg" else start.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--straggler", "m0/0"], "GPU=FACTOR"),
        (["--straggler", "m0/0=0.5"], "a factor >= 1"),
        (["--straggler", "m0/0=nan"], "a factor >= 1"),
        (["--outage", "m0"], "MACHINE@START"),
        (["--outage", "m0@1.2.3+4"], "MACHINE@START"),
        (["--model", "paper", "--calibration", "x.yaml"], "no coefficients"),
    ],
)
def test_options_that_cannot_be_read_are_bad_input(case: Case, options: list[str], words: str) -> None:
    result = case.run(*options)
    assert isinstance(result.exception, InputError)
    assert words in str(result.exception)


@pytest.mark.parametrize(
    ("options", "field"),
    [(["--straggler", "m7/0=2"], "stragglers[m7/0].gpu"), (["--outage", "m7@1+1"], "failures[m7]")],
)
def test_gpus_and_machines_that_do_not_exist_are_bad_input(case: Case, options: list[str], field: str) -> None:
    result = case.run(*options)
    assert isinstance(result.exception, SpecError)
    assert field in str(result.exception)


@pytest.mark.parametrize("content", ["", "0", "12 many", "-3", "1.5", "[1, 2, 0]"])
def test_response_lengths_that_are_none_are_bad_input(case: Case, content: str) -> None:
    file = case.folder / "lengths.txt"
    file.write_text(content)
    result = case.run("--lengths", str(file))
    assert isinstance(result.exception, InputError)
    assert "lengths.txt holds" in str(result.exception)


def test_plan_of_another_cluster_and_broken_plans_name_the_file(case: Case) -> None:
    case.write(one_gpu_each(cluster_of(3), case.job, "m0/0", "m1/0"))
    result = case.run()
    assert isinstance(result.exception, PlanMismatchError)
    assert str(result.exception).startswith(str(case.plan_file))
    broken = one_gpu_each(case.cluster, job_of(prompts=5), "m0/0", "m1/0")
    case.write(broken.model_copy(update={"job": case.job.fingerprint}))
    result = case.run()
    assert isinstance(result.exception, SpecError)
    assert f"{case.plan_file}: tasks.actor_generation.replicas is 10 samples in sum" in str(result.exception)


def test_plan_that_exceeds_a_memory_is_not_simulated(case: Case) -> None:
    case.cluster_file.write_text(CLUSTER.replace("memory_gb: 1000", "memory_gb: 0.000001"))
    small = load_cluster(case.cluster_file.read_text(), "c")
    case.write(one_gpu_each(small, case.job, "m0/0", "m1/0"))
    result = case.run()
    assert isinstance(result.exception, CommandError)
    assert "cannot run on this cluster: m0/0 needs" in str(result.exception)
