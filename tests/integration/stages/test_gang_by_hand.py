"""A policy trained by two machines together: two stage processes with homes of their own, joined over loopback.

Marked `slow`: its engines start in three epochs, which takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from plans.plan import Plan
from plans.workflow import RlTask
from stages.context import open_context
from stages.contract import StageName, StageRequest, StageResult
from stages.engines.gang_place import GangPlace
from stages.engines.manager import EngineManager
from stages.gang_layout import gang_layout
from stages.plan_history import with_adoption
from stages.runs import create_run, resolve_run
from stages.timing import Clock, Deadline, PhaseTimer
from storage.documents import json_bytes
from storage.gangs import read_members
from storage.layout import checkpoint_folder, iteration_plan, manifest_key, policy_folder
from storage.policies import resolve_policy
from storage.policy_fetch import local_policy_folder
from storage.runs import decide_plan, write_plan
from storage.store import Store, open_store
from tests.helpers.gang_plans import pipeline_over
from tests.helpers.hand_run import TINY_JOB

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(3600)]

RUN = "gang-run"
CLUSTER = """
format: motley.cluster/1
name: two
machines:
  - {name: m0, region: here, gpu: cpu, count: 1, address: 127.0.0.1}
  - {name: m1, region: here, gpu: cpu, count: 1, address: 127.0.0.1}
links: {same_zone: {latency_ms: 0.1, bandwidth_gbps: 10}}
"""
CHANGES = {
    "iterations": 1,
    "grpo": {"num_mini_batches": 2},
    "evaluation": {"every": 0, "prompts": 4},
    "engines": {"training": {"name": "megatron"}, "start_timeout_s": 1500.0},
    "limits": {"gang_wait_s": 60.0, "gang_lost_s": 600.0},
}


class GangRun:
    """A run whose policy lies on two machines: one layer on each."""

    def __init__(self, base: Path) -> None:
        self.base, self.root = base, str(base / "store")
        document = yaml.safe_load(TINY_JOB.format(samples_per_shard=16))
        self.run = resolve_run(yaml.safe_dump({**document, **CHANGES}), CLUSTER, RUN, None, None, self.root)
        create_run(self.run)
        write_plan(self.store, RUN, 0, with_adoption(self.plan(("m0", "m1")), 0, "test").to_document())
        write_plan(self.store, RUN, 1, with_adoption(self.plan(("m0",)), 0, "test").to_document())
        decide_plan(self.store, RUN, 0, 0)

    @property
    def store(self) -> Store:
        return open_store(self.root)

    def plan(self, machines: tuple[str, ...]) -> Plan:
        """Return a plan that trains in one pipeline over machines."""
        return pipeline_over(self.run.cluster, self.run.job, machines)

    def start(self, stage: str, machine: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a stage on a machine."""
        state_dir = self.base / machine
        jobs = state_dir / "jobs" / RUN / "000000" / stage
        folder = jobs / f"attempt-{len(list(jobs.glob('attempt-*'))):03d}"
        folder.mkdir(parents=True)
        request = {
            "stage": stage, "run": RUN, "iteration": 0, "root": self.root, "machine": machine,
            "state_dir": str(state_dir), "attempt": f"{stage}-{machine}-{folder.name}", "deadline_s": 3000.0,
        }  # fmt: skip
        path = folder / "request.json"
        path.write_text(json.dumps(request))
        process = subprocess.Popen(
            [sys.executable, "-m", "stages", stage, "--request", str(path)],
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
        )
        return process, folder / "result.json"

    def results(self, *started: tuple[subprocess.Popen[bytes], Path]) -> list[StageResult]:
        """Wait for stages."""
        for process, _ in started:
            process.wait()
        return [StageResult.model_validate_json(path.read_bytes()) for _, path in started]

    def trained(self) -> dict[str, np.ndarray]:
        """Return the tensors of policy version 1."""
        folder = local_policy_folder(self.store, resolve_policy(self.store, RUN, 1))
        assert folder is not None
        return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}

    def forget_version_1(self) -> None:
        for folder in (policy_folder(RUN, 1), checkpoint_folder(RUN, 1)):
            self.store.delete(manifest_key(folder))

    def live_gang(self, machine: str) -> GangPlace | None:
        """Return where the machine's training engine stands, if it can be used again."""
        clock = Clock()
        request = StageRequest(
            stage=StageName.TRAIN, run=RUN, iteration=0, root=self.root, machine=machine,
            state_dir=str(self.base / machine), attempt="look",
        )  # fmt: skip
        context = open_context(request, PhaseTimer(), Deadline(clock=clock, ends_at=clock.monotonic() + 600))
        return context.engines.live_gang(gang_layout(context.plan.tasks[RlTask.ACTOR_TRAINING], "megatron"))

    def stop(self) -> None:
        for machine in ("m0", "m1"):
            EngineManager(self.base / machine).stop_all()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GangRun]:
    """A run with the rollouts and rewards of its iteration."""
    made = GangRun(tmp_path_factory.mktemp("gang"))
    try:
        for stage in ("prepare", "generate", "infer"):
            (result,) = made.results(made.start(stage, "m0"))
            assert result.error is None, result.error
        yield made
    finally:
        made.stop()


def test_gang_trains_what_one_machine_trains_whatever_happened_before(run: GangRun) -> None:
    # The other machine does not come.
    (alone,) = run.results(run.start("train", "m0"))
    assert alone.error is not None
    assert (alone.error.type, alone.error.is_retryable) == ("stages.errors.DeadlineError", True)
    assert "m1 did not join the training gang of iteration 0 within 60 s" in alone.error.message

    # Both come, and the other one dies, stage and engine; its next attempt voids the epoch.
    first, lost = run.start("train", "m0"), run.start("train", "m1")
    _wait_for_epoch(run, 1)
    lost[0].kill()
    lost[0].wait()
    EngineManager(run.base / "m1").stop_all()
    again = run.start("train", "m1")
    (failed,) = run.results(first)
    assert failed.error is not None
    assert failed.error.is_retryable
    assert "gang" in failed.error.message
    assert not run.store.exists(manifest_key(policy_folder(RUN, 1)))

    # The first one's next attempt finds the other in the new epoch.
    lead, helper = run.results(run.start("train", "m0"), again)
    assert (lead.error, helper.error) == (None, None)
    assert lead.metrics["gang"] == {"epoch": 2, "machines": ["m0", "m1"]} == helper.metrics["gang"]
    together = run.trained()
    assert [manifest.created_by for manifest in [resolve_policy(run.store, RUN, 1).manifest]] == ["train@m0"]

    # A cleared task trains nothing again, whichever machine it is on.
    repeated = run.results(run.start("train", "m1"))
    assert [result.reused for result in repeated] == [True]

    # Made anew, it is made by the engines that live.
    engines = [run.live_gang("m0"), run.live_gang("m1")]
    run.forget_version_1()
    lead, helper = run.results(run.start("train", "m0"), run.start("train", "m1"))
    assert (lead.error, helper.error) == (None, None)
    assert lead.metrics["gang"] == {"epoch": 3, "machines": ["m0", "m1"]}
    assert [run.live_gang("m0"), run.live_gang("m1")] == engines
    assert None not in engines
    for name, value in run.trained().items():
        assert np.abs(together[name] - value).max() < 1e-6, name

    # One machine does the same from the same rows and the same first version.
    run.forget_version_1()
    run.store.publish(iteration_plan(RUN, 0), json_bytes(_other_plan(run)))
    (single,) = run.results(run.start("train", "m0"))
    assert single.error is None
    assert "gang" not in single.metrics
    expected = run.trained()
    assert sorted(together) == sorted(expected)
    for name, value in expected.items():
        assert np.abs(together[name] - value).max() < 1e-5, name
    before = load_file(_version_0(run) / "model.safetensors")
    assert max(float(np.abs(value - before[name]).max()) for name, value in expected.items()) > 1e-3


def _wait_for_epoch(run: GangRun, epoch: int) -> None:
    while len(read_members(run.store, RUN, 0, "actor_training", epoch, ("m0", "m1"))) < 2:
        time.sleep(0.1)


def _other_plan(run: GangRun) -> dict[str, object]:
    document: dict[str, object] = json.loads(run.store.read_bytes(iteration_plan(RUN, 0)))
    return {**document, "plan": 1}


def _version_0(run: GangRun) -> Path:
    folder = local_policy_folder(run.store, resolve_policy(run.store, RUN, 0))
    assert folder is not None
    return folder
