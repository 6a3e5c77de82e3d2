"""Engines in the process of the tests, behind the same client and the same messages as those in processes of their own.

Real engines with real weights; what is left out is the process, its start and its socket.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

from stages.engines.architecture import read_architecture
from stages.engines.client import RemoteEngine
from stages.engines.launch import EngineLaunch, EngineRecord
from stages.engines.registry import engine_factory
from stages.engines.wire import methods_of


class EngineHere(RemoteEngine):
    """The client's side: every call is encoded, decoded and made here."""

    def __init__(self, record: EngineRecord, engine: Any) -> None:
        """Have an engine; it lives on when this is closed."""
        self.record, self.engine = record, engine

    def close(self) -> None:
        """Leave the engine alone."""

    def _call(self, method: str, *, is_urgent: bool = False, **arguments: object) -> Any:
        del is_urgent
        codec = methods_of(self.record.launch.role)[method]
        result = getattr(self.engine, method)(**codec.decode_arguments(codec.encode_arguments(arguments)))
        return codec.decode_result(codec.encode_result(result))


class EnginesHere:
    """Takes the place of `EngineManager`: engines by identity, shared by all contexts of a state directory."""

    _ALL: dict[Path, dict[str, EngineHere]] = {}

    def __init__(self, state_dir: Path) -> None:
        """See the engines of a state directory."""
        self._engines = self._ALL.setdefault(state_dir, {})

    def acquire(self, launch: EngineLaunch, model_dir: Path, **_: float) -> EngineHere:
        """Return the engine of a launch; build it if there is none."""
        identity = launch.identity()
        if identity not in self._engines:
            record = EngineRecord(
                identity=identity, launch=launch, model_dir=model_dir, architecture=read_architecture(model_dir),
                pid=os.getpid(), process_started_at=psutil.Process().create_time(), socket=Path("none"),
                log_path=Path("none"),
            )  # fmt: skip
            engine = engine_factory(launch.role, launch.name)(launch, model_dir)
            self._engines[identity] = EngineHere(record, engine)
        return self._engines[identity]

    def list(self) -> list[EngineRecord]:
        """Return the records of the engines."""
        return [engine.record for engine in self._engines.values()]

    def stop(self, identity: str) -> bool:
        """End an engine."""
        found = self._engines.pop(identity, None)
        if found is not None:
            found.engine.close()
        return found is not None

    def stop_all(self) -> int:
        """End all engines, as a reboot of the machine would; return their number."""
        return sum(self.stop(identity) for identity in [*self._engines])
