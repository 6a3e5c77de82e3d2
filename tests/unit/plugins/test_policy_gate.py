from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("airflow.sdk")

from airflow.sdk.exceptions import TaskDeferred

from plugins import policy_trigger
from plugins.policy_gate import PolicyGateOperator
from plugins.policy_trigger import PolicyVersionTrigger
from stages.errors import DeadlineError, StageError
from stages.home import logical_date_of
from storage.documents import model_bytes
from storage.errors import CredentialsError, TransientStorageError
from storage.layout import policy_head
from storage.policies import PolicyHead
from storage.store import open_store


def commit(root: Path, version: int) -> None:
    head = PolicyHead(version=version, weights_hash="0" * 64, rollbacks=())
    open_store(str(root)).publish(policy_head("demo"), model_bytes(head, policy_head("demo")))


def gate(root: Path, max_lead: int = 0) -> PolicyGateOperator:
    return PolicyGateOperator(task_id="wait_for_policy", run="demo", root=str(root), max_lead=max_lead, deadline_s=60.0)


def context(iteration: int) -> Any:
    return {"dag_run": SimpleNamespace(logical_date=logical_date_of(iteration))}


def event_of(trigger: PolicyVersionTrigger) -> dict[str, Any]:
    async def first() -> dict[str, Any]:
        async for event in trigger.run():
            return dict(event.payload)
        raise AssertionError("no event")

    return asyncio.run(first())


def trigger_of(root: Path, version: int, deadline_in_s: float = 60.0) -> PolicyVersionTrigger:
    return PolicyVersionTrigger(
        run="demo", root=str(root), version=version, deadline_at=time.time() + deadline_in_s, poll_interval_s=0.01
    )


def test_gate_with_the_version_committed_opens_without_deferring(tmp_path: Path) -> None:
    commit(tmp_path, 3)
    assert gate(tmp_path).execute(context(3)) == 3


@pytest.mark.parametrize(("iteration", "max_lead", "needed"), [(0, 0, 0), (3, 0, 3), (1, 2, 0), (5, 2, 3)])
def test_gate_needs_the_version_that_the_staleness_bound_says(
    tmp_path: Path, iteration: int, max_lead: int, needed: int
) -> None:
    assert gate(tmp_path, max_lead).version_needed(iteration) == needed


def test_gate_without_the_version_defers(tmp_path: Path) -> None:
    commit(tmp_path, 2)
    with pytest.raises(TaskDeferred) as deferred:
        gate(tmp_path).execute(context(3))
    assert isinstance(deferred.value.trigger, PolicyVersionTrigger)
    assert (deferred.value.trigger.version, deferred.value.method_name) == (3, "execute_complete")


def test_gate_of_a_run_without_policies_defers_from_the_second_iteration_on(tmp_path: Path) -> None:
    assert gate(tmp_path).execute(context(0)) == 0
    with pytest.raises(TaskDeferred):
        gate(tmp_path, max_lead=1).execute(context(1))


def test_gate_past_its_deadline_fails_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        DeadlineError,
        match=r"^generation of iteration 3 waits for training of iteration 2: policy version 3 of run demo was not "
        r"committed within 60 s \(the head is 2\); look at that iteration's tasks, then run `motley resume demo`",
    ):
        gate(tmp_path).execute_complete(context(3), {"version": 2, "is_reached": False})


@pytest.mark.parametrize(
    ("iteration", "max_lead", "holds", "sentence"),
    [
        (5, 2, "generation", "generation of iteration 5 waits for training of iteration 2: policy version 3"),
        (5, 0, "training", "training of iteration 5 waits for training of iteration 4: policy version 5"),
        (1, 2, "generation", "generation of iteration 1 waits for the initial policy of iteration 0: policy version 0"),
    ],
)
def test_gate_past_its_deadline_names_who_waits_for_whom(
    tmp_path: Path, iteration: int, max_lead: int, holds: str, sentence: str
) -> None:
    held = PolicyGateOperator(
        task_id="g", run="demo", root=str(tmp_path), max_lead=max_lead, deadline_s=60.0, holds=holds
    )
    with pytest.raises(DeadlineError, match=sentence):
        held.execute_complete(context(iteration), {"version": None, "is_reached": False})


def test_gate_that_cannot_read_the_store_fails_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="can't be read: CredentialsError: expired"):
        gate(tmp_path).execute_complete(context(3), {"error": "CredentialsError: expired"})


def test_gate_after_its_wait_returns_the_version(tmp_path: Path) -> None:
    assert gate(tmp_path).execute_complete(context(3), {"version": 4, "is_reached": True}) == 4


def test_trigger_fires_when_the_version_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([None, 1, 2])
    monkeypatch.setattr(policy_trigger, "read_head_version", lambda *_: next(looks))
    assert event_of(trigger_of(tmp_path, 2)) == {"version": 2, "is_reached": True}


def test_trigger_past_its_deadline_says_what_it_saw(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    assert event_of(trigger_of(tmp_path, 2, deadline_in_s=-1.0)) == {"version": 1, "is_reached": False}


def raising(error: Exception) -> Callable[..., int]:
    def read(*_: object) -> int:
        raise error

    return read


def test_trigger_waits_out_a_store_that_is_away_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_trigger, "read_head_version", raising(TransientStorageError("throttled")))
    assert event_of(trigger_of(tmp_path, 2, deadline_in_s=0.05)) == {"version": None, "is_reached": False}


def test_trigger_passes_on_an_error_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_trigger, "read_head_version", raising(CredentialsError("expired")))
    assert event_of(trigger_of(tmp_path, 2)) == {"error": "CredentialsError: expired"}


def test_trigger_serialised_and_back_is_the_same(tmp_path: Path) -> None:
    path, arguments = trigger_of(tmp_path, 2).serialize()
    assert path == f"{PolicyVersionTrigger.__module__}.{PolicyVersionTrigger.__qualname__}"
    assert PolicyVersionTrigger(**arguments).serialize() == (path, arguments)
