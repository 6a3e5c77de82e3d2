"""New weights reach a running engine: by one way, whatever the job's memory settings are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from stages import weight_sync
from stages.context import StageContext
from stages.engines.canary import CanaryRecord
from stages.engines.protocol import ScoredTokens
from storage.policies import Policy, publish_policy
from tests.helpers.stage_contexts import make_context, make_run, publish

STAGES = Path(weight_sync.__file__).parent
ROW = ScoredTokens(prompt_token_ids=[1, 2], completion_token_ids=[3, 4])
LOGPROBS = [-0.5, -0.25]


@dataclass
class RunningEngine:
    """An engine that holds version 0 and notes what is asked of it."""

    identity: str
    calls: list[str] = field(default_factory=list)
    held: tuple[int, str] = (0, "start")

    @property
    def record(self) -> Any:
        return SimpleNamespace(identity=self.identity, pid=1, process_started_at=0.0, describe=lambda: "engine")

    def info(self) -> Any:
        return SimpleNamespace(policy_version=self.held[0], weights_hash=self.held[1])

    def load_weights(self, directory: Path, version: int, digest: str, base: object, *, is_urgent: bool) -> None:
        assert (directory / "model.safetensors").is_file()
        self.calls.append(f"load {version}")
        self.held = (version, digest)

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        self.calls.append("score")
        return [LOGPROBS for _ in rows]


def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]) -> tuple[RunningEngine, Any]:
    """Run a weight sync of version 1 beside a running engine, twice; return the engine and the first outcome."""
    run = make_run(tmp_path, changes=changes)
    context = make_context(run, tmp_path, "weight_sync", 0, region="a")
    publish(context, 0, is_head=True)
    policy = _publish_with_canary(context)
    pool = context.engines
    engine = RunningEngine(pool._generation_launch(0).identity())
    monkeypatch.setattr(pool.manager, "list", lambda: [engine.record])
    monkeypatch.setattr(pool, "_acquire", lambda launch, base: engine)
    outcome = weight_sync.run_stage(context)
    assert engine.held == (1, policy.weights_hash)
    assert weight_sync.run_stage(context).reused
    return engine, outcome


def _publish_with_canary(context: StageContext) -> Policy:
    canary = CanaryRecord(rows=[ROW], trainer_logprobs=[LOGPROBS])
    files = {"model.safetensors": save({"w": np.ones(4, np.float32)}), "config.json": b"{}"}
    return publish_policy(context.home, "r", 1, files, created_by="t", metadata={"canary": canary.to_json()})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"{max_num_seqs: 512}": "{max_num_seqs: 1, memory_fraction: 0.05}"},
        {"recompute: none": "recompute: full"},
        {"training: {name: accelerate}": "training: {name: accelerate}\n  idle_timeout_s: 0.1"},
    ],
)
def test_w4_sync_does_not_depend_on_memory_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    """W4: a cache flag skipped the sync."""
    engine, outcome = synced(tmp_path, monkeypatch, changes)
    assert (outcome.metrics["engines"], engine.calls) == (1, ["load 1", "score"])


def test_w10_one_handshake_loads_and_proves_every_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W10: three private protocols. Offered by the commit, loaded, proved by the canary, noted; and nowhere else."""
    engine, _ = synced(tmp_path, monkeypatch, {})
    assert engine.calls == ["load 1", "score"]  # the second sync found the proof
    callers = {
        path.name
        for path in STAGES.glob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\.load_weights\(", line)
    }
    assert callers == {"engine_pool.py"}
