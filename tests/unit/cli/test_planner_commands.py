"""`motley plan`, `cost`, `compare`: exit codes, JSON, files. The commands run in this process."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.errors import CommandError, InputError
from cli.planner import app
from plans.errors import InfeasibleError, SpecError
from plans.spec.load import load_job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CLUSTER = str(EXAMPLES / "clusters" / "hetrl-multi-region-hybrid-16.yaml")
JOB = str(EXAMPLES / "jobs" / "planner" / "qwen3-4b-grpo-async.yaml")
OTHER_JOB = str(EXAMPLES / "jobs" / "planner" / "qwen3-8b-grpo-async.yaml")
BASE = ["--cluster", CLUSTER, "--job", JOB]


@pytest.fixture
def run():
    whole = typer.Typer()
    whole.add_typer(app)
    runner = CliRunner()

    def call(*arguments):
        return runner.invoke(whole, list(arguments))

    return call


@pytest.fixture
def plan_file(run, tmp_path):
    file = tmp_path / "plan.json"
    result = run("plan", *BASE, "--budget", "60evals", "--model", "paper", "--out", str(file))
    assert result.exit_code == 0
    return file


def test_plan_json_is_the_plan_document(run):
    result = run("plan", *BASE, "--budget", "80evals", "--seed", "4", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["format"], document["method"]) == (0, "motley.plan/1", "sha-ea")
    assert document["search"]["evaluations"] == 80
    assert document["search"]["seed"] == 4
    assert document["predicted"]["feasible"] is True


def test_plan_text_says_what_limits_the_iteration(run):
    result = run("plan", *BASE, "--budget", "60evals")
    assert "per iteration" in result.stdout
    assert "actor_generation" in result.stdout
    assert "limits the iteration" in result.stdout
    assert "$/h" in result.stdout


def test_cost_of_a_plan_equals_its_prediction(run, plan_file):
    result = run("cost", *BASE, "--plan", str(plan_file), "--model", "paper", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(plan_file.read_text())["predicted"]


def test_cost_of_an_overfull_plan_prints_it_and_fails(run, plan_file):
    document = json.loads(plan_file.read_text())
    stage = {"layers": 36, "gpus": [document["tasks"]["actor_training"]["replicas"][0]["stages"][0]["gpus"][0]]}
    replica = {"samples": 3072, "micro_batch_size": 1, "stages": [stage]}
    document["tasks"]["actor_training"] = {"dp": 1, "pp": 1, "tp": 1, "replicas": [replica]}
    plan_file.write_text(json.dumps(document))
    result = run("cost", *BASE, "--plan", str(plan_file), "--json")
    report = json.loads(result.stdout)
    assert report["feasible"] is False
    assert stage["gpus"][0] in report["violations"][0]
    assert isinstance(result.exception, CommandError)
    assert "cannot run" in str(result.exception)


def test_plan_for_another_job_is_bad_input(run, plan_file):
    result = run("cost", "--cluster", CLUSTER, "--job", OTHER_JOB, "--plan", str(plan_file))
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith(f"{plan_file}: the plan was made for another job")


def test_plan_that_leaves_out_the_critic_is_refused_with_its_file(run, plan_file):
    other = EXAMPLES / "jobs" / "planner" / "qwen3-4b-ppo-async.yaml"
    document = json.loads(plan_file.read_text())
    document["job"] = load_job(other.read_text(), "job").fingerprint
    plan_file.write_text(json.dumps(document))
    for command in (("cost", "--plan"), ("plan", "--budget", "1evals", "--start")):
        result = run(command[0], "--cluster", CLUSTER, "--job", str(other), *command[1:], str(plan_file))
        assert isinstance(result.exception, SpecError)
        assert f"{plan_file}: tasks is without critic_training" in str(result.exception)


def test_compare_prints_ratios_to_the_best(run):
    result = run("compare", *BASE, "--methods", "sha-ea,verl", "--budget", "150evals", "--json")
    rows = {row["method"]: row for row in json.loads(result.stdout)["methods"]}
    assert set(rows) == {"sha-ea", "verl"}
    assert min(row["ratio_to_best"] for row in rows.values()) == 1.0


def test_unknown_method_is_bad_input(run):
    result = run("plan", *BASE, "--method", "magic")
    assert isinstance(result.exception, InputError)
    assert "sha-ea" in str(result.exception)


@pytest.mark.parametrize("budget", ["soon", "0s", "-1evals"])
def test_unreadable_budget_is_bad_input(run, budget):
    result = run("plan", *BASE, f"--budget={budget}")
    assert isinstance(result.exception, InputError)


def test_missing_file_is_bad_input(run):
    result = run("plan", "--cluster", "nowhere.yaml", "--job", JOB)
    assert isinstance(result.exception, InputError)
    assert "nowhere.yaml" in str(result.exception)


def test_faulty_cluster_reports_every_fault(run, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "format: motley.cluster/1\nname: x\nmachines:\n- {name: a, region: r, gpu: H900, count: 8, intra_gb_s: 1}\n"
        "- {name: b, region: s, gpu: L4, count: 0, intra_gb_s: 1}\n"
    )
    result = run("plan", "--cluster", str(file), "--job", JOB)
    assert isinstance(result.exception, SpecError)
    assert len(result.exception.faults) >= 2


def test_job_that_cannot_fit_is_infeasible(run):
    small = str(EXAMPLES / "clusters" / "hetrl-single-region-8.yaml")
    big = str(EXAMPLES / "jobs" / "planner" / "qwen3-14b-ppo-sync.yaml")
    result = run("plan", "--cluster", small, "--job", big)
    assert isinstance(result.exception, InfeasibleError)
    assert "needs" in str(result.exception)


def test_picture_of_a_plan_is_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    assert run("plan", *BASE, "--budget", "40evals", "--picture", str(file)).exit_code == 0
    assert "<svg" in file.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "nowhere/plan.json"], "there is no folder"),
        (["--out", "."], "it is a folder"),
        (["--picture", "nowhere/plan.svg"], "there is no folder"),
        (["--picture", "plan.txt"], "use the suffix .svg"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_search(run, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cli.planner.make_plan", lambda *_: pytest.fail("it searched"))
    result = run("plan", *BASE, *options)
    assert isinstance(result.exception, InputError)
    assert words in str(result.exception)


def test_coefficients_of_an_unknown_gpu_type_are_bad_input(run, tmp_path):
    file = tmp_path / "k.yaml"
    file.write_text("format: motley.calibration/1\ngpu_types: {A100: {hbm: 0.5}}\n")
    result = run("plan", *BASE, "--calibration", str(file))
    assert isinstance(result.exception, SpecError)
    assert "write 'A100-40' or 'A100-80'" in str(result.exception)


def test_start_for_another_job_names_its_file(run, plan_file):
    result = run("plan", "--cluster", CLUSTER, "--job", OTHER_JOB, "--start", str(plan_file))
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith(str(plan_file))


def test_testbed_prints_a_cluster_file(run):
    result = run("testbed", "areal-hex-8-24")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].startswith("# areal-hex-8-24: 32 GPUs")
