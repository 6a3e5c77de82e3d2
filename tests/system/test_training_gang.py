"""A policy trained by two machines together through a real Airflow: a task and an Edge worker on each (this computer).

The lead of the gang is `left`. `right` dies in the middle of training, as by a loss of power, and the run still ends
with the same tokens and weights as one that nothing disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plans.plan import Plan
from plans.spec.load import load_cluster
from plans.workflow import RlTask
from stages.contract import StageName, StageResult, StageStatus
from stages.launch import StageAttempt
from stages.spec.job import load_training_job
from storage.gangs import newest_epoch, read_members
from storage.layout import gangs_folder
from storage.policies import head_version, resolve_policy
from storage.rollouts import read_family
from tests.helpers.gang_plans import pipeline_over
from tests.system.deployed import Deployment, deployment, kill, needs_engines, outcome, until
from tests.system.first_model import with_first_model

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(7200),
    needs_engines,
]

SPECS = Path(__file__).parent / "specs"
CLUSTER = SPECS / "two_trainers.yaml"
MACHINES = ("left", "right")
TASK = RlTask.ACTOR_TRAINING.value
ITERATIONS = 3
STRUCK = 1
"""Iteration in which a machine dies; engines live from the one before."""
TOKENS = ("prompt_index", "sample_index", "completion_token_ids")
COMMAND_S = 3000.0
"""Longest command; a crowded machine is many times slower than an idle one."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny job with megatron-core, and patience that a crowded machine needs."""
    made = with_first_model(SPECS / "tiny_job.yaml", tmp_path_factory.mktemp("first") / "model")
    document = yaml.safe_load(made.read_text())
    document["engines"] |= {"training": {"name": "megatron"}, "start_timeout_s": 1500}
    document["limits"] = {"gang_wait_s": 900.0, "gang_lost_s": 45.0}
    made.write_text(yaml.safe_dump(document, sort_keys=False))
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment with both workers."""
    with deployment(tmp_path_factory.mktemp("pair")) as found:
        up = found.motley("up", "--cluster", str(CLUSTER), "--json", timeout_s=COMMAND_S)
        assert outcome(up)["workers"] == [*MACHINES]
        yield found


@pytest.fixture(scope="module")
def calm(pair: Deployment, job: Path) -> dict[str, Any]:
    """What a run made that nothing disturbed."""
    done = pair.motley(*start(job, "calm", pair), "--json", timeout_s=COMMAND_S)
    assert outcome(done)["state"] == "finished"
    return made_by(pair, "calm")


def start(job: Path, run: str, found: Deployment) -> tuple[str, ...]:
    """Return the command that starts a run whose policy lies on both machines, one layer on each."""
    plan = found.home.path / f"{run}-plan.json"
    plan.write_text(plan_of(job).to_json())
    return (
        "run", "--job", str(job), "--cluster", str(CLUSTER), "--name", run, "--plan", str(plan),
        "--iterations", str(ITERATIONS),
    )  # fmt: skip


def plan_of(job: Path) -> Plan:
    cluster = load_cluster(CLUSTER.read_text(), CLUSTER.name)
    return pipeline_over(cluster, load_training_job(job.read_text(), job.name), MACHINES)


def made_by(found: Deployment, run: str) -> dict[str, Any]:
    """Return what doesn't depend on the name of a run."""
    return {
        "weights": [resolve_policy(found.store, run, version).weights_hash for version in range(ITERATIONS + 1)],
        "tokens": [
            # Rows come in the order of their identities, which depend on the run's name.
            sorted(
                tuple(row.values()) for row in read_family(found.store, run, k, "rollouts", columns=TOKENS).to_pylist()
            )
            for k in range(ITERATIONS)
        ],
    }


def gang_facts(found: Deployment, run: str, iteration: int) -> dict[str, Any]:
    """Return what the policy that an iteration made says of its gang."""
    manifest = resolve_policy(found.store, run, iteration + 1).manifest
    facts: dict[str, Any] = manifest.metadata["training"]["gang"]
    return facts


def results(found: Deployment, run: str, iteration: int, machine: str) -> list[StageResult]:
    """Return the results of a machine's attempts at training, oldest first; dead ones have none."""
    state_dir = found.home.worker_home(machine).state_dir(machine)
    attempts = [a for a in found.attempts(StageName.TRAIN.value, iteration) if state_dir in a.folder.parents]
    ours = sorted((a for a in attempts if a.folder.parts[-5] == run), key=StageAttempt.started_at)
    return [result for a in ours if isinstance(result := a.result(), StageResult)]


def is_whole(found: Deployment, run: str, iteration: int) -> bool:
    """Whether both machines are in the newest epoch of an iteration's gang and train."""
    epoch = newest_epoch(found.store, run, iteration, TASK)
    members = read_members(found.store, run, iteration, TASK, epoch, MACHINES)
    return [members[name].state for name in MACHINES if name in members] == ["joined"] * len(MACHINES)


def test_every_iteration_is_trained_by_both_machines(pair: Deployment, calm: dict[str, Any]) -> None:
    assert len(set(calm["weights"])) == ITERATIONS + 1
    for k in range(ITERATIONS):
        assert gang_facts(pair, "calm", k)["machines"] == [*MACHINES]
        ends = {machine: results(pair, "calm", k, machine)[-1] for machine in MACHINES}
        assert [end.status for end in ends.values()] == [StageStatus.OK] * 2
        assert ends["left"].metrics["gang"] == ends["right"].metrics["gang"] == gang_facts(pair, "calm", k)
        manifest = resolve_policy(pair.store, "calm", k + 1).manifest
        assert manifest.created_by == "train@left"


def test_run_survives_the_death_of_a_member_and_makes_what_it_would_have_made(
    pair: Deployment, job: Path, calm: dict[str, Any]
) -> None:
    begun = pair.motley(*start(job, "struck", pair), "--detach", timeout_s=COMMAND_S)
    assert begun.returncode == 0, begun.stderr
    until(lambda: is_whole(pair, "struck", STRUCK), "the gang of the struck iteration", COMMAND_S)
    assert kill(pair.machine("right")) > 1
    (failed,) = until(lambda: results(pair, "struck", STRUCK, "left"), "the lead's end", COMMAND_S)
    assert failed.error is not None
    assert failed.error.is_retryable
    assert "right" in failed.error.message
    assert head_version(pair.store, "struck") == STRUCK

    again = pair.motley("up", "--cluster", str(CLUSTER), "--json", timeout_s=COMMAND_S)
    assert again.returncode == 0, again.stderr
    done = pair.motley("resume", "struck", "--json", timeout_s=COMMAND_S)
    assert outcome(done)["policy_version"] == ITERATIONS
    assert gang_facts(pair, "struck", STRUCK)["epoch"] > gang_facts(pair, "calm", STRUCK)["epoch"]
    assert made_by(pair, "struck") == calm
    assert outcome(pair.motley("verify", "struck", "--json", timeout_s=COMMAND_S))["is_good"]


def test_what_gangs_said_is_gone_when_their_iterations_are_committed(pair: Deployment) -> None:
    for run in ("calm", "struck"):
        left = [info.key for k in range(ITERATIONS) for info in pair.store.list(gangs_folder(run, k))]
        assert left == []
