"""The queue in front of an engine: order, refusals, errors of libraries."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from stages.engines.call_queue import CallQueue
from stages.engines.engine_state import WeightState
from stages.engines.protocol import EngineInfo, ScoredTokens
from stages.engines.wire import methods_of
from stages.errors import ContractError, EngineError, EngineUnavailableError


class EchoEngine:
    """A scoring engine that answers with the thread it ran on and the ids it got."""

    def __init__(self) -> None:
        self.weights = WeightState("echo")

    def info(self) -> EngineInfo:
        raise ValueError("no such register")

    def load_weights(self, directory: Path, policy_version: int, weights_hash: str, base: object = None) -> None:
        self.weights.give_up(f"{directory} {policy_version} {weights_hash}")

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        return [[float(threading.get_ident()), *row.completion_token_ids] for row in rows]

    def close(self) -> None:
        self.weights.give_up("closed")


def body_of(method: str, **arguments: object) -> bytes:
    return methods_of("scoring")[method].encode_arguments(arguments)


def test_calls_run_in_order_on_the_thread_of_run() -> None:
    calls = CallQueue("scoring")
    row = ScoredTokens(prompt_token_ids=[1], completion_token_ids=[7])
    futures = [calls.submit("score", body_of("score", rows=[row])) for _ in range(3)]
    calls.run(EchoEngine(), idle_timeout_s=0.01)
    answers = [methods_of("scoring")["score"].decode_result(future.result()) for future in futures]
    assert answers == [[[float(threading.get_ident()), 7.0]]] * 3


def test_error_of_a_library_becomes_an_engine_error() -> None:
    calls = CallQueue("scoring")
    future = calls.submit("info", body_of("info"))
    calls.run(EchoEngine(), idle_timeout_s=0.01)
    with pytest.raises(EngineError, match="info failed: ValueError: no such register") as caught:
        future.result()
    assert caught.value.attributes == {"method": "info", "cause": "ValueError"}


def test_arguments_that_do_not_fit_reach_no_engine() -> None:
    calls = CallQueue("scoring")
    future = calls.submit("score", b"\x80")
    calls.run(EchoEngine(), idle_timeout_s=0.01)
    with pytest.raises(ContractError, match="don't fit its signature"):
        future.result()


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ContractError, match="a scoring engine has no method 'train'"):
        CallQueue("scoring").submit("train", b"")


def test_idle_queue_refuses_what_comes_too_late() -> None:
    calls = CallQueue("scoring")
    calls.run(EchoEngine(), idle_timeout_s=0.01)
    with pytest.raises(EngineUnavailableError, match="idle for too long"):
        calls.submit("info", b"")


def test_ending_process_refuses_waiting_calls() -> None:
    calls = CallQueue("scoring")
    future = calls.submit("info", body_of("info"))
    calls.refuse("the engine process is ending")
    with pytest.raises(EngineUnavailableError, match="is ending"):
        future.result()


def test_cancelled_call_is_left_out() -> None:
    calls = CallQueue("scoring")
    cancelled = calls.submit(
        "load_weights", body_of("load_weights", directory="/a", policy_version=1, weights_hash="h")
    )
    assert cancelled.cancel()
    calls.run(EchoEngine(), idle_timeout_s=0.01)
    assert calls.unusable_reason is None


def test_unusable_engine_is_reported() -> None:
    calls = CallQueue("scoring")
    calls.submit("load_weights", body_of("load_weights", directory="/a", policy_version=1, weights_hash="h"))
    calls.run(EchoEngine(), idle_timeout_s=0.01)
    assert calls.unusable_reason == "/a 1 h"


class PatientEngine(EchoEngine):
    """Scores until it is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.is_interrupted = lambda: False
        self.began = threading.Event()
        self.log: list[str] = []

    def load_weights(self, directory: Path, policy_version: int, weights_hash: str, base: object = None) -> None:
        self.log.append(f"loaded {policy_version}")

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        self.began.set()
        self.log.append("interrupted" if self.is_interrupted() else "scored")
        return []


def test_urgent_call_interrupts_what_runs_before_it_and_nothing_after_it() -> None:
    """Calls keep their order; work queued before urgent weights sees that they wait, work queued after does not."""
    calls, engine = CallQueue("scoring"), PatientEngine()
    weights = body_of("load_weights", directory=Path("d"), policy_version=1, weights_hash="h")
    answers = [
        calls.submit("score", body_of("score", rows=[])),
        calls.submit("load_weights", weights, is_urgent=True),
        calls.submit("score", body_of("score", rows=[])),
        calls.submit("load_weights", weights),
        calls.submit("score", body_of("score", rows=[])),
    ]
    calls.run(engine, 0.2)

    for answer in answers:
        answer.result()
    assert engine.log == ["interrupted", "loaded 1", "scored", "loaded 1", "scored"]
    assert not calls.has_urgent()
