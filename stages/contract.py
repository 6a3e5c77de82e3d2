"""The JSON contract between whoever starts a stage (Airflow, a shell, a test) and the stage process.

A stage is started as `python -m stages NAME --request FILE`. It reads one `StageRequest`, does its work, commits
artefacts to the object store and leaves one `StageResult` beside the request. Only references and small numbers stand
in either document.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class StageName(StrEnum):
    """Every stage: those of an iteration in their order, then those that are run when wanted."""

    PREPARE = "prepare"
    PROFILE = "profile"
    PLAN = "plan"
    GENERATE = "generate"
    INFER = "infer"
    """Rewards and reference log-probs in one stage (GRPO)."""
    REWARD_INFERENCE = "reward_inference"
    REFERENCE_INFERENCE = "reference_inference"
    CRITIC_INFERENCE = "critic_inference"
    TRAIN = "train"
    """The policy's training (the planner's task `actor_training`)."""
    CRITIC_TRAINING = "critic_training"
    COMMIT_POLICY = "commit_policy"
    WEIGHT_SYNC = "weight_sync"
    EVALUATE = "evaluate"
    REPORT = "report"
    REPLICATE = "replicate"


class StageStatus(StrEnum):
    """How a stage ended."""

    OK = "ok"
    """The work is done and committed (by this attempt or, with `reused`, by an earlier one)."""
    FAILED = "failed"
    """`error` says why; nothing half-written is visible."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class StageRequest(_Document):
    """What a stage process is asked to do."""

    format: Literal["motley.stage-request/1"] = "motley.stage-request/1"
    stage: StageName
    """Stage to run."""
    run: str = Field(min_length=1)
    """Run name; the resolved job and cluster are read from its run record."""
    iteration: int = Field(ge=0)
    """Iteration k, from the logical date of the DAG run."""
    root: str
    """Object-store root (fsspec URL) of the region in which the stage runs."""
    machine: str
    """Machine of the cluster file on which the stage runs."""
    state_dir: str
    """Local directory of this machine's deployment: job folders, engine registry, caches."""
    attempt: str = Field(min_length=1)
    """Name of this attempt; only used in the keys of data objects, so that attempts never overwrite each other."""
    deadline_s: float = Field(default=3600.0, gt=0)
    """Seconds after which the stage gives up with a `DeadlineError`."""
    params: dict[str, JsonValue] = {}
    """Stage-specific settings, e.g. `region` of a weight sync. Never anything that the run record has."""

    def fingerprint(self) -> str:
        """Return the SHA-256 of what determines the outcome: all but attempt, deadline and local paths."""
        identity = self.model_dump(mode="json", exclude={"attempt", "deadline_s", "state_dir"})
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


class StageFailure(_Document):
    """A stage's error, in a form that another process can act on."""

    type: str
    """Dotted class path, e.g. `stages.errors.EngineError`."""
    message: str
    """What, where, the value found, the rule and the remedy."""
    attributes: dict[str, JsonValue] = {}
    """Facts behind the message."""
    is_retryable: bool
    """Whether another attempt can succeed without anybody changing anything."""


class StageResult(_Document):
    """What a stage process leaves behind."""

    format: Literal["motley.stage-result/1"] = "motley.stage-result/1"
    stage: StageName
    run: str
    iteration: int
    fingerprint: str
    """`StageRequest.fingerprint()` of the request that this answers."""
    status: StageStatus
    reused: bool = False
    """True when an earlier attempt's committed artefacts were found and nothing was computed."""
    artefacts: list[str] = []
    """Keys of committed manifests or records, relative to the root."""
    metrics: dict[str, JsonValue] = {}
    """Small numbers for the iteration record."""
    started_at: float
    """Unix time at which the process began its work, seconds."""
    ended_at: float
    """Unix time at which the work was committed, seconds."""
    phases_s: dict[str, float] = {}
    """Seconds by named phase (e.g. `engine_start`, `generate`, `commit`)."""
    error: StageFailure | None = None
    """Set when `status` is `failed`."""
