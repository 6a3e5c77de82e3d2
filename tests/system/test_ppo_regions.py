"""PPO over three Edge workers in three networks and two regions, through a real Airflow; one worker dies on the way.

The planner places the six tasks. `tiny` is seconds an iteration; `smollm2` is the job of `examples/ppo-regions`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from plans.plan import Plan
from plans.workflow import RlTask
from plugins.iteration_dag import RETRIES
from scripts.regions.airflow import machine_at, motley, processes_at, start_worker, wait_for_workers
from scripts.regions.crossings import store_of
from scripts.regions.example import EXAMPLES, runnable_job, standing_regions
from scripts.regions.layout import Place, Regions, home_of
from stages.contract import StageResult, StageStatus
from stages.home import MotleyHome
from stages.launch import StageAttempt, all_attempts
from stages.plan_history import numbered_plan
from stages.sharding import machine_of, shard_ranges, shards_by_replica
from stages.spec.job import TrainingJob, load_training_job
from storage.critics import resolve_critic
from storage.policies import head_version, resolve_policy
from storage.regional_view import view_of
from storage.rollout_schema import Family
from storage.rollouts import find_shard, read_rollouts
from storage.runs import decided_plan, read_iteration
from storage.store import Store
from tests.system.deployed import command_of, kill, needs_engines, until
from tests.system.first_model import with_first_model
from tests.system.regional import assert_nothing_runs

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    needs_engines,
]

EXAMPLE = EXAMPLES / "ppo-regions"
CLUSTER = EXAMPLE / "cluster.yaml"
TINY = Path(__file__).parent / "specs" / "tiny_ppo_job.yaml"
RUN = "ppo-regions"
STRUCK = 1
"""Iteration in which a worker dies: the second one."""
INFERENCE = {
    Family.ROLLOUTS: ("generate", RlTask.ACTOR_GENERATION),
    Family.REWARD: ("reward_inference", RlTask.REWARD_INFERENCE),
    Family.REFERENCE: ("reference_inference", RlTask.REFERENCE_INFERENCE),
    Family.VALUES: ("critic_inference", RlTask.CRITIC_INFERENCE),
}
"""Stage and task that make a family."""


@dataclass(slots=True)
class Run:
    """A run that ended, looked at while its regions stood and when they were gone."""

    folder: Path
    job: TrainingJob
    layout: Regions
    struck: str
    """Machine whose worker died."""
    killed: int = 0
    outcome: dict[str, Any] = field(default_factory=dict)
    verified: dict[str, Any] = field(default_factory=dict)

    @property
    def home(self) -> Store:
        return store_of(self.layout.home)

    @property
    def stores(self) -> Store:
        return view_of([store_of(region) for region in self.layout.regions])

    def plan(self, iteration: int) -> Plan:
        number = decided_plan(self.home, RUN, iteration)
        assert number is not None
        return numbered_plan(self.home, RUN, number).plan


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    given = with_first_model(TINY, folder / "first") if request.param == "tiny" else EXAMPLE / "job.yaml"
    job_file = runnable_job(keeping_all_versions(given, folder), folder)
    job = load_training_job(job_file.read_text(), str(job_file))
    with standing_regions(folder, CLUSTER) as layout:
        files = [f"--cluster={CLUSTER}", f"--job={job_file}"]
        motley(layout, layout.home, "run", "--name", RUN, *files, "--detach")
        found = Run(folder, job, layout, struck="")
        looks = itertools.count(1)
        place, stage = until(
            lambda: (next(looks) % 100 or demand_progress(folder)) and busy_elsewhere(layout),
            f"work of iteration {STRUCK} elsewhere", 3000.0, 0.3,
        )  # fmt: skip
        found.struck = machine_at(CLUSTER, place)
        found.killed = kill([stage]) + kill(processes_at(layout, place))
        found.layout = start_worker(layout, folder, CLUSTER, place)
        wait_for_workers(found.layout, [found.struck])
        found.outcome = motley(layout, layout.home, "resume", RUN)
        found.verified = motley(layout, layout.home, "verify", RUN)
    return found


def keeping_all_versions(given: Path, folder: Path) -> Path:
    """Return a copy of a job whose policies and critics all stay, for the checks below to look at."""
    document = yaml.safe_load(given.read_text(encoding="utf-8"))
    kept = document["iterations"] + 1
    document["storage"] |= {"keep_policies": kept, "keep_checkpoints": kept}
    copy = folder / "job.yaml"
    copy.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return copy


def busy_elsewhere(layout: Regions) -> tuple[Place, psutil.Process] | None:
    """Return a network other than Airflow's, and a process in it that runs a stage of the struck iteration."""
    for place in layout.places[1:]:
        for process in processes_at(layout, place):
            line = " ".join(command_of(process))
            if "--request" in line and f"/{RUN}/{STRUCK:06d}/" in line:
                return place, process
    return None


def demand_progress(folder: Path) -> bool:
    """Fail with the reason once a stage has failed as often as Airflow tries it; a run waits for nobody then."""
    failures: dict[Path, list[str]] = defaultdict(list)
    for file in folder.glob(f"*/motley/**/jobs/{RUN}/*/*/*/attempt-*/result.json"):
        if (error := StageResult.model_validate_json(file.read_bytes()).error) is not None:
            failures[file.parents[1]].append(error.message)
    assert all(len(messages) <= RETRIES for messages in failures.values()), failures
    return True


def attempts(run: Run, iteration: int) -> Iterator[StageAttempt]:
    """Yield the attempts at stages of an iteration on the machine whose worker died."""
    place = next(place for place in run.layout.places[1:] if machine_at(CLUSTER, place) == run.struck)
    for attempt in all_attempts(MotleyHome(home_of(place)).state_dir(run.struck)):
        if attempt.folder.parts[-4] == f"{iteration:06d}":
            yield attempt


def test_run_ends_at_the_last_version_and_is_whole_over_both_stores(run: Run) -> None:
    iterations = run.job.iterations
    assert iterations >= 3
    assert (run.outcome["state"], run.outcome["policy_version"]) == ("finished", iterations)
    assert head_version(run.home, RUN) == iterations
    assert run.verified["is_good"]
    assert run.verified["stores"] == [region.root for region in run.layout.regions]
    families = [Family.REWARD, Family.REFERENCE, Family.VALUES, Family.TRAINING]
    for k in range(iterations):
        rows = read_rollouts(run.stores, RUN, k, columns=["row_id", "reward", "values"], families=families)
        assert rows.num_rows == run.job.planner.num_samples


def test_planner_placed_all_six_tasks_on_all_three_machines(run: Run) -> None:
    for k in range(run.job.iterations):
        plan = run.plan(k)
        assert plan.method == "sha-ea"
        assert {*plan.tasks} == {*RlTask}
        assert {machine_of(placed, i) for placed in plan.tasks.values() for i in range(placed.dp)} == {
            "west-0", "west-1", "east-0",
        }  # fmt: skip


def test_every_shard_was_made_by_the_machine_that_the_plan_names(run: Run) -> None:
    num_shards = len(shard_ranges(run.job.prompts_per_iteration, run.job.prompts_per_shard))
    for k in range(run.job.iterations):
        for family, (stage, task) in INFERENCE.items():
            placed = run.plan(k).tasks[task]
            dealt = shards_by_replica(num_shards, [replica.samples for replica in placed.replicas])
            planned = {shard: machine_of(placed, replica) for replica, own in enumerate(dealt) for shard in own}
            made = {shard: find_shard(run.stores, RUN, k, shard, family=family) for shard in range(num_shards)}
            makers = {shard: manifest and manifest.created_by for shard, manifest in made.items()}
            assert makers == {shard: f"{stage}@{machine}" for shard, machine in planned.items()}


def test_policy_and_critic_were_trained_by_the_machine_that_the_plan_names(run: Run) -> None:
    for k in range(run.job.iterations):
        tasks = run.plan(k).tasks
        policy, critic = resolve_policy(run.home, RUN, k + 1), resolve_critic(run.home, RUN, k + 1)
        assert policy.manifest.created_by == f"train@{machine_of(tasks[RlTask.ACTOR_TRAINING], 0)}"
        assert critic.manifest.created_by == f"critic_training@{machine_of(tasks[RlTask.CRITIC_TRAINING], 0)}"
        assert policy.manifest.metadata["data"] == critic.manifest.metadata["data"]


def test_what_the_dead_worker_had_begun_was_done_again(run: Run) -> None:
    assert run.killed > 1
    results = {attempt: attempt.result() for attempt in attempts(run, STRUCK)}
    lost = [attempt for attempt, result in results.items() if result is None]
    assert lost != []
    # A folder of attempts is a stage with equal inputs; each one that was lost ended well later.
    done = {a.folder.parent for a, r in results.items() if isinstance(r, StageResult) and r.status is StageStatus.OK}
    assert {attempt.folder.parent for attempt in lost} <= done


def test_critic_learns_and_its_loss_is_recorded(run: Run) -> None:
    records = [read_iteration(run.home, RUN, k) for k in range(run.job.iterations)]
    assert all(record.metrics["value_loss"] is not None and record.metrics["value_loss"] > 0 for record in records)
    versions = [resolve_critic(run.home, RUN, version).weights_hash for version in range(run.job.iterations + 1)]
    assert len(set(versions)) == len(versions)
    values = []
    for k in range(run.job.iterations):
        rows = read_rollouts(run.stores, RUN, k, columns=["values"], families=[Family.VALUES])
        values.append({value for row in rows.to_pylist() for value in row["values"]})
    assert values[0] == {0.0}  # it begins by saying 0 of everything
    assert all(len(each) > 1 for each in values[1:])


def test_both_models_of_rewards_were_asked(run: Run) -> None:
    for k in range(run.job.iterations):
        parts = read_rollouts(run.stores, RUN, k, families=[Family.REWARD]).to_pylist()
        named = {name for row in parts for name, _ in row["reward_parts"]}
        assert named == {"exact_answer", "reward_model"}


def test_nothing_runs_afterwards(run: Run) -> None:
    assert_nothing_runs(run.layout, run.folder)
