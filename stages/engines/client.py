"""The client's side of an engine in another process: the protocol's methods, each one call over a Unix socket."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httpx

from stages.engines.launch import EngineRecord
from stages.engines.process import find_process, log_tail
from stages.engines.protocol import (
    AdapterBase,
    Completion,
    CriticOutcome,
    CriticTrainingRequest,
    EngineInfo,
    GenerationRequest,
    ScoredTokens,
    TrainingOutcome,
    TrainingRequest,
)
from stages.engines.wire import URGENT_HEADER, decode_error, methods_of
from stages.errors import DeadlineError, EngineError, EngineUnavailableError

CONNECT_TIMEOUT_S = 10.0
"""Longest wait for the socket to accept."""


class RemoteEngine:
    """An engine in its own process, with the methods of its role's protocol.

    Errors of the engine are raised again here with their class, message and attributes. A process that dies during a
    call gives `EngineUnavailableError`, a call that passes its deadline `DeadlineError`; both name pid and log.
    """

    def __init__(self, record: EngineRecord, call_timeout_s: float = 3600.0) -> None:
        self.record = record
        self.call_timeout_s = call_timeout_s
        """Longest duration of one call, seconds."""
        self._http = open_channel(record.socket)

    def info(self) -> EngineInfo:
        """Describe the engine and the weights it holds."""
        return cast("EngineInfo", self._call("info"))

    def load_weights(
        self,
        directory: Path,
        policy_version: int,
        weights_hash: str,
        base: AdapterBase | None = None,
        *,
        is_urgent: bool = False,
    ) -> None:
        """Replace the weights in place; see `ScoringEngine.load_weights`.

        Args:
            directory: Where the weights are.
            policy_version: Their version.
            weights_hash: Their hash.
            base: What they are an adapter on; None where they are whole.
            is_urgent: Interrupt a running `generate`, if the engine can.
        """
        self._call(
            "load_weights",
            is_urgent=is_urgent,
            directory=directory,
            policy_version=policy_version,
            weights_hash=weights_hash,
            **_given(base),
        )

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Return log-probs of completion tokens; see `ScoringEngine.score`."""
        return cast("list[list[float]]", self._call("score", rows=rows))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample completions; see `GenerationEngine.generate`."""
        return cast("list[Completion]", self._call("generate", requests=requests))

    def load_checkpoint(
        self,
        policy_dir: Path,
        trainer_dir: Path | None,
        policy_version: int,
        weights_hash: str,
        base: AdapterBase | None = None,
    ) -> None:
        """Take up a resume point; see `TrainingEngine.load_checkpoint`."""
        self._call(
            "load_checkpoint",
            policy_dir=policy_dir,
            trainer_dir=trainer_dir,
            policy_version=policy_version,
            weights_hash=weights_hash,
            **_given(base),
        )

    def train(self, request: TrainingRequest) -> TrainingOutcome:
        """Make optimizer steps; see `TrainingEngine.train`."""
        return cast("TrainingOutcome", self._call("train", request=request))

    def save(self, policy_dir: Path, trainer_dir: Path, policy_version: int) -> None:
        """Write serving weights and a resume point; see `TrainingEngine.save`."""
        self._call("save", policy_dir=policy_dir, trainer_dir=trainer_dir, policy_version=policy_version)

    def values(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Return values of completion tokens; see `CriticEngine.values`."""
        return cast("list[list[float]]", self._call("values", rows=rows))

    def train_critic(self, request: CriticTrainingRequest) -> CriticOutcome:
        """Make the critic's optimizer steps; see `CriticEngine.train_critic`."""
        return cast("CriticOutcome", self._call("train_critic", request=request))

    def rewards(self, rows: Sequence[ScoredTokens]) -> list[float]:
        """Return scores of completions; see `RewardEngine.rewards`."""
        return cast("list[float]", self._call("rewards", rows=rows))

    def close(self) -> None:
        """Close the connection; the engine process lives on until it is idle for too long or stopped by its manager."""
        self._http.close()

    def _call(self, method: str, *, is_urgent: bool = False, **arguments: object) -> Any:  # noqa: ANN401 - of the method
        codec = methods_of(self.record.launch.role).get(method)
        if codec is None:
            raise EngineError(f"{self.record.describe()} has no method {method!r}", method=method)
        timeout = httpx.Timeout(self.call_timeout_s, connect=CONNECT_TIMEOUT_S)
        started = time.monotonic()
        try:
            headers = {URGENT_HEADER: "1"} if is_urgent else {}
            content = codec.encode_arguments(arguments)
            answer = self._http.post(f"/call/{method}", content=content, headers=headers, timeout=timeout)
        except httpx.TimeoutException as error:
            waited_s = time.monotonic() - started
            raise DeadlineError(
                f"{self.record.describe()} did not answer {method!r} within {waited_s:.1f} s; "
                "raise the deadline or look into its log",
                method=method,
                pid=self.record.pid,
                log=str(self.record.log_path),
            ) from error
        except httpx.TransportError as error:
            raise self._unavailable(method, error) from error
        if answer.status_code == httpx.codes.OK:
            return codec.decode_result(answer.content)
        raise decode_error(answer.content)

    def _unavailable(self, method: str, error: httpx.TransportError) -> EngineUnavailableError:
        is_alive = find_process(self.record.pid, self.record.process_started_at) is not None
        state = "is still running" if is_alive else "has ended"
        return EngineUnavailableError(
            f"{self.record.describe()} broke off {method!r} ({type(error).__name__}: {error}); the process {state}; "
            f"acquire the engine again to replace it. End of its log:\n{log_tail(self.record.log_path)}",
            method=method,
            pid=self.record.pid,
            log=str(self.record.log_path),
        )


def _given(base: AdapterBase | None) -> dict[str, Any]:
    """Return the argument where there is one: engines that know no adapters take none."""
    return {} if base is None else {"base": base}


def open_channel(socket: Path) -> httpx.Client:
    """Return an HTTP client that speaks over a Unix socket and heeds no proxy settings."""
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://engine", trust_env=False)
