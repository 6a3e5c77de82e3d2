"""`motley rent`: both goals, tables, JSON, files, and what bad input gets. The command runs in this process."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.errors import InputError
from cli.rent import app
from plans.cost import CostModel, price
from plans.errors import SpecError
from plans.plan_load import load_plan
from plans.renting.choose import NothingAffordableError, ThroughputOutOfReachError
from plans.spec.load import cluster_from_document, load_cluster, load_job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
JOB = str(EXAMPLES / "jobs" / "planner" / "qwen3-4b-grpo-async.yaml")
OFFERS = """
format: motley.offers/1
name: shop
offers:
  - {name: fast, region: east, gpu: A100-80, gpus_per_machine: 4, machines: 1, usd_per_hour: 5.0, intra_gb_s: 600}
  - {name: cheap, region: east, gpu: L40S, gpus_per_machine: 4, machines: 2, usd_per_hour: 1.5, intra_gb_s: 64}
links:
  same_zone: {latency_ms: 0, bandwidth_gbps: 100}
"""
QUICK = ("--budget", "5evals", "--most-plans", "2")


@pytest.fixture
def run(tmp_path):
    whole = typer.Typer()
    whole.add_typer(app)

    def call(*arguments, offers=OFFERS):
        file = tmp_path / "offers.yaml"
        file.write_text(offers)
        return CliRunner().invoke(whole, ["rent", "--offers", str(file), "--job", JOB, *arguments])

    return call


def test_budget_is_kept_and_the_document_says_what_each_machine_does(run):
    result = run("--usd-per-hour", "33", *QUICK, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["goal"] == {"usd_per_hour": 33.0}
    assert found["usd_per_hour"] == sum(row["usd_per_hour"] for row in found["rented"]) <= 33.0
    assert found["usd_per_million_samples"] == pytest.approx(
        found["usd_per_hour"] / 3600 / found["samples_per_s"] * 1e6
    )
    gpus = {
        gpu
        for task in found["plan"]["tasks"].values()
        for r in task["replicas"]
        for s in r["stages"]
        for gpu in s["gpus"]
    }
    assert sum(row["generating"] + row["other_tasks"] for row in found["rented"]) == len(gpus)
    for row in found["rented"]:
        assert 0 < row["generating"] + row["other_tasks"] <= row["gpus"]
    assert 1 <= len(found["considered"]) <= 2
    best = max(found["considered"], key=lambda entry: entry["samples_per_s"])
    assert best["machines"] == {row["offer"]: row["machines"] for row in found["rented"]}


def test_dual_takes_the_least_money_for_the_throughput(run):
    most = json.loads(run("--usd-per-hour", "100", *QUICK, "--json").stdout)
    found = json.loads(run("--samples-per-s", str(most["samples_per_s"] / 20), "--budget", "5evals", "--json").stdout)
    assert found["samples_per_s"] >= most["samples_per_s"] / 20
    assert found["usd_per_hour"] < most["usd_per_hour"]


def test_tables_name_machines_money_and_use(run):
    result = run("--usd-per-hour", "33", *QUICK)
    assert result.exit_code == 0
    assert result.stdout.startswith("Rent ")
    for words in ("$/h", "samples/s", "Sets planned: ", "generating", "limits the iteration", "L40S"):
        assert words in result.stdout


def test_files_are_what_the_other_commands_read(run, tmp_path):
    plan_file, cluster_file = tmp_path / "plan.json", tmp_path / "cluster.yaml"
    result = run("--usd-per-hour", "12", *QUICK, "--out", str(plan_file), "--cluster-out", str(cluster_file), "--json")
    found = json.loads(result.stdout)
    cluster = load_cluster(cluster_file.read_text(), "cluster.yaml")
    assert cluster == cluster_from_document(found["cluster"], "cluster")
    plan = load_plan(plan_file.read_text(), "plan.json")
    job = load_job(Path(JOB).read_text(), JOB)
    assert price(cluster, job, plan, CostModel.calibrated()).throughput_samples_s == found["samples_per_s"]


def test_budget_that_buys_nothing_says_the_least_that_would_do(run):
    result = run("--usd-per-hour", "1", *QUICK)
    assert isinstance(result.exception, NothingAffordableError)
    assert str(result.exception).endswith("the least that would do is 6.00 $/h for 1 x cheap (4 x L40S).")


def test_throughput_out_of_reach_is_a_valid_request_that_cannot_be_met(run):
    result = run("--samples-per-s", "1000000", *QUICK)
    assert isinstance(result.exception, ThroughputOutOfReachError)


def test_missing_price_is_named(run):
    result = run("--usd-per-hour", "33", offers=OFFERS.replace("usd_per_hour: 5.0, ", ""))
    assert isinstance(result.exception, SpecError)
    assert "without usd_per_hour for fast" in str(result.exception)


@pytest.mark.parametrize("goals", [(), ("--usd-per-hour", "3", "--samples-per-s", "4")])
def test_renting_has_exactly_one_goal(run, goals):
    result = run(*goals)
    assert isinstance(result.exception, InputError)
    assert "--usd-per-hour or --samples-per-s" in str(result.exception)


@pytest.mark.parametrize(
    "goal", ["--usd-per-hour=0", "--usd-per-hour=-2", "--samples-per-s=nan", "--samples-per-s=inf"]
)
def test_goal_that_is_no_positive_number_is_bad_input(run, goal):
    result = run(goal)
    assert isinstance(result.exception, InputError)
    assert "positive number" in str(result.exception)


def test_price_list_with_too_many_sets_and_unknown_method_are_bad_input(run):
    many = run(
        "--usd-per-hour",
        "9",
        offers=OFFERS.replace("machines: 1,", "machines: 512,").replace("machines: 2,", "machines: 1000,"),
    )
    assert isinstance(many.exception, SpecError)
    unknown = run("--usd-per-hour", "9", "--method", "magic")
    assert isinstance(unknown.exception, InputError)
    assert "areal-hex" in str(unknown.exception)


def test_every_example_price_list_is_readable():
    from plans.renting import load_offers

    files = sorted((EXAMPLES / "offers").glob("*.yaml"))
    assert files
    for file in files:
        assert load_offers(file.read_text(), str(file)).offers
