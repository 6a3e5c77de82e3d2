"""Run records, iteration records, profiles and plans: the small JSON documents of a run.

A new run refuses a folder that holds anything (C20); continuing is an explicit :func:`load_run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from storage import layout
from storage.documents import json_bytes, model_bytes, parse_json, publish_once, read_model
from storage.errors import AlreadyPublishedError, InvalidInputError, ObjectMissingError, RunNotEmptyError
from storage.store import Store

RUN_FORMAT = "motley.run/1"
ITERATION_FORMAT = "motley.iteration/1"
ITERATION_PLAN_FORMAT = "motley.iteration_plan/1"


class RunRecord(BaseModel):
    """The document ``run.json``: everything that a run was started with."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: Literal["motley.run/1"] = "motley.run/1"
    """Kind and version of this document."""
    run: str
    """Run name, the first segment of every key."""
    job: dict[str, Any]
    """Resolved job document (``motley.job/1``)."""
    cluster: dict[str, Any]
    """Resolved cluster document (``motley.cluster/1``)."""
    num_iterations: int = Field(ge=0)
    """Iterations asked for when the run was created."""
    seeds: dict[str, int]
    """Seeds by purpose, e.g. sampling, data, model."""
    fingerprints: dict[str, str] = Field(default_factory=dict)
    """SHA-256 by subject, e.g. job, cluster, dataset, tokenizer, template, initial_policy."""
    package_versions: dict[str, str] = Field(default_factory=dict)
    """Version by package."""
    git_commit: str | None = None
    """Commit of the code, with ``+dirty`` if it was changed; ``None`` outside a repository."""
    created_at: datetime
    """When, UTC."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """JSON-able extras."""


class IterationPlan(BaseModel):
    """The document ``plan.json`` of an iteration: the decision of its plan stage."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.iteration_plan/1"] = "motley.iteration_plan/1"
    """Kind and version of this document."""
    plan: int = Field(ge=0)
    """Number of the plan that the iteration uses."""


class IterationRecord(BaseModel):
    """The document ``record.json`` of an iteration: what was measured."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: Literal["motley.iteration/1"] = "motley.iteration/1"
    """Kind and version of this document."""
    run: str
    """Run name."""
    iteration: int = Field(ge=0)
    """RL iteration."""
    plan: int | None = None
    """Number of the plan that was used."""
    policy_version_start: int | None = None
    """Policy version that the iteration trained from."""
    policy_version_end: int | None = None
    """Policy version that it committed."""
    started_at: datetime | None = None
    """Start of its first stage, UTC."""
    ended_at: datetime | None = None
    """End of its last stage, UTC."""
    measured_s: dict[str, float] = Field(default_factory=dict)
    """Measured seconds by stage."""
    predicted_s: dict[str, float] = Field(default_factory=dict)
    """Predicted seconds by stage."""
    counts: dict[str, int] = Field(default_factory=dict)
    """Counts, e.g. rows, tokens, dropped."""
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """Metrics by name; ``None`` = not defined this iteration (never NaN)."""
    optimizer_steps: list[dict[str, float | None]] = Field(default_factory=list)
    """Metrics of each optimizer step, in order."""
    alarms: list[str] = Field(default_factory=list)
    """Sentences about what looks wrong."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """JSON-able extras."""


def create_run(store: Store, record: RunRecord) -> RunRecord:
    """Start a run's folder with its record.

    Raises:
        RunNotEmptyError: Anything lies below the run's name already.
        InvalidNameError: The name cannot be an object key.
        InvalidInputError: The record cannot be stored as JSON.
    """
    key = layout.run_record(record.run)
    encoded = model_bytes(record, key)
    refuse_taken_name(store, record.run)
    if not store.create(key, encoded):
        raise _not_empty(store, record.run, key)
    return record


def refuse_taken_name(store: Store, run: str) -> None:
    """Refuse a name under which anything lies.

    Raises:
        RunNotEmptyError: Something does.
    """
    found = next(iter(store.list(layout.run_folder(run))), None)
    if found is not None:
        raise _not_empty(store, run, found.key)


def _not_empty(store: Store, run: str, found: str) -> RunNotEmptyError:
    message = (
        f"{store.url}/{layout.run_folder(run)} is not empty (it holds {found}): choose another run name, or continue "
        f"it with `motley resume {run}` (`motley resume {store.url}/{run}` if `motley runs` does not list it)"
    )
    return RunNotEmptyError(message, key=layout.run_record(run))


def load_run(store: Store, run: str) -> RunRecord:
    """Return the record of a run.

    Raises:
        ObjectMissingError: No such run.
        CorruptObjectError: Its record is damaged.
        SchemaVersionError: Its record is newer than this code.
    """
    try:
        return read_model(store, layout.run_record(run), RunRecord, RUN_FORMAT)
    except ObjectMissingError as error:
        message = f"{store.url} has no run {run!r}; `motley runs` lists those there are"
        raise ObjectMissingError(message, key=layout.run_record(run)) from error


def list_runs(store: Store) -> list[str]:
    """Return the names of all runs under the root, by listing (for people, not for stages)."""
    keys = (info.key.split("/") for info in store.list(""))
    return sorted({parts[0] for parts in keys if parts[1:] == ["run.json"]})


def write_iteration(store: Store, record: IterationRecord) -> None:
    """Write an iteration's record; a later, fuller one replaces it (its one writer is the report stage)."""
    key = layout.iteration_record(record.run, record.iteration)
    store.publish(key, model_bytes(record, key))


def read_iteration(store: Store, run: str, iteration: int) -> IterationRecord:
    """Return an iteration's record.

    Raises:
        ObjectMissingError: The iteration has not been reported yet.
        CorruptObjectError: The record is damaged.
    """
    return read_model(store, layout.iteration_record(run, iteration), IterationRecord, ITERATION_FORMAT)


def write_profile(store: Store, run: str, number: int, document: Mapping[str, Any], queue: str | None = None) -> str:
    """Commit profile ``number`` (of one queue, or of the whole cluster) and return its key; it never changes.

    Raises:
        AlreadyPublishedError: Another profile has that number.
        InvalidInputError: Not JSON-able or without ``format``.
    """
    return _write_document(store, layout.profile(run, number, queue), document, "profile")


def read_profile(store: Store, run: str, number: int, queue: str | None = None) -> dict[str, Any]:
    """Return a profile. Raises ``ObjectMissingError`` or ``CorruptObjectError``."""
    return _read_document(store, layout.profile(run, number, queue))


def write_plan(store: Store, run: str, number: int, document: Mapping[str, Any]) -> str:
    """Commit plan ``number`` and return its key; it never changes.

    Raises:
        AlreadyPublishedError: Another plan has that number.
        InvalidInputError: Not JSON-able or without ``format``.
    """
    return _write_document(store, layout.plan(run, number), document, "plan")


def read_plan(store: Store, run: str, number: int) -> dict[str, Any]:
    """Return a plan document. Raises ``ObjectMissingError`` or ``CorruptObjectError``."""
    return _read_document(store, layout.plan(run, number))


def decide_plan(store: Store, run: str, iteration: int, number: int) -> int:
    """Commit which plan an iteration uses, once and for all; return the number in force (the first one decided)."""
    key = layout.iteration_plan(run, iteration)
    try:
        publish_once(store, key, model_bytes(IterationPlan(plan=number), key), "decision on a plan")
    except AlreadyPublishedError:
        return read_model(store, key, IterationPlan, ITERATION_PLAN_FORMAT).plan
    return number


def decided_plan(store: Store, run: str, iteration: int) -> int | None:
    """Return the number of the plan that an iteration uses, None while its plan stage has not decided."""
    try:
        return read_model(store, layout.iteration_plan(run, iteration), IterationPlan, ITERATION_PLAN_FORMAT).plan
    except ObjectMissingError:
        return None


def _write_document(store: Store, key: str, document: Mapping[str, Any], what: str) -> str:
    if not isinstance(document.get("format"), str):
        message = f"{key}: field format is {document.get('format')!r}, a {what} carries format: motley.<kind>/<version>"
        raise InvalidInputError(message, key=key)
    publish_once(store, key, json_bytes(dict(document), key), what)
    return key


def _read_document(store: Store, key: str) -> dict[str, Any]:
    return parse_json(store.read_bytes(key), key, store.url)
