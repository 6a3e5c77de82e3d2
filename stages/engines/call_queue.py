"""One call after the other: the queue between the HTTP thread and the engine on the main thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from stages.engines.launch import Role
from stages.engines.protocol import Engine
from stages.engines.wire import MethodCodec, methods_of
from stages.errors import ContractError, EngineError, EngineUnavailableError, StageError

_LOGGER = logging.getLogger(__name__)
_POLL_S = 0.5
"""How often the main thread looks at the clock and gives signal handlers a turn while nothing is to do."""


@dataclass(frozen=True, slots=True)
class _Call:
    codec: MethodCodec
    body: bytes
    is_urgent: bool = False
    answer: Future[bytes] = field(default_factory=Future)


class CallQueue:
    """Takes calls from any thread, executes them on the thread that called `run`."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._codecs = methods_of(role)
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._urgent = 0
        self._last_use = time.monotonic()
        self._refusal: str | None = None
        self._is_ready = False
        self._engine: Engine | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the engine has been built."""
        return self._is_ready

    @property
    def unusable_reason(self) -> str | None:
        """Why the engine can't be used any more; None while it can."""
        weights = getattr(self._engine, "weights", None)
        reason: str | None = getattr(weights, "unusable_reason", None)
        return reason

    def touch(self) -> None:
        """Start the idle time again."""
        self._last_use = time.monotonic()

    def has_urgent(self) -> bool:
        """Whether a call waits that a running `generate` makes room for."""
        return self._urgent > 0

    def submit(self, method: str, body: bytes, *, is_urgent: bool = False) -> Future[bytes]:
        """Queue a call; the future gives the encoded result or raises the error.

        Args:
            method: Method of the role's protocol.
            body: Encoded arguments.
            is_urgent: Whether an engine that can be interrupted ends a running `generate` early for this call. What is
                asked after it, the rest of the interrupted completions included, has its turn after it.
        """
        codec = self._codecs.get(method)
        if codec is None:
            raise ContractError(f"a {self._role} engine has no method {method!r}", method=method, role=self._role)
        call = _Call(codec, body, is_urgent)
        with self._lock:
            if self._refusal is not None:
                raise EngineUnavailableError(f"call of {method!r} refused: {self._refusal}", method=method)
            self._pending += 1
            self._urgent += is_urgent
            self._calls.put(call)
        return call.answer

    def run(self, engine: Engine, idle_timeout_s: float) -> None:
        """Execute calls until there has been none for `idle_timeout_s`."""
        self._engine = engine
        if hasattr(engine, "is_interrupted"):
            engine.is_interrupted = self.has_urgent
        self.touch()
        self._is_ready = True
        while True:
            try:
                call = self._calls.get(timeout=min(_POLL_S, idle_timeout_s))
            except queue.Empty:
                if self._refuse_if_idle(idle_timeout_s):
                    return
                continue
            with self._lock:
                self._urgent -= call.is_urgent
            self._execute(engine, call)
            with self._lock:
                self._pending -= 1
                self.touch()

    def refuse(self, reason: str) -> None:
        """Refuse all calls from now on, also those in the queue."""
        with self._lock:
            self._refusal = reason
        while not self._calls.empty():
            call = self._calls.get()
            call.answer.set_exception(EngineUnavailableError(f"call of {call.codec.name!r} refused: {reason}"))

    def _refuse_if_idle(self, idle_timeout_s: float) -> bool:
        with self._lock:
            if self._pending or time.monotonic() - self._last_use < idle_timeout_s:
                return False
            self._refusal = "the engine process was idle for too long and is ending"
            return True

    def _execute(self, engine: Engine, call: _Call) -> None:
        name = call.codec.name
        started = time.monotonic()
        if not call.answer.set_running_or_notify_cancel():
            return  # the caller went away before its turn
        try:
            arguments = call.codec.decode_arguments(call.body)
            call.answer.set_result(call.codec.encode_result(getattr(engine, name)(**arguments)))
        except StageError as error:
            _LOGGER.exception("call of %s failed", name)
            call.answer.set_exception(error)
        except Exception as error:  # any error of a library goes to the caller, typed; the log has the traceback
            _LOGGER.exception("call of %s failed", name)
            call.answer.set_exception(
                EngineError(f"{name} failed: {type(error).__name__}: {error}", method=name, cause=type(error).__name__)
            )
        except BaseException:
            call.answer.set_exception(EngineUnavailableError(f"the engine process was ended during {name!r}"))
            raise
        _LOGGER.info("%s took %.3f s", name, time.monotonic() - started)
