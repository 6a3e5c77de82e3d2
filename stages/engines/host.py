"""The process around an engine: `python -m stages.engines.host --launch FILE`.

The engine lives on the main thread, so that libraries which care find themselves there, and takes one call after the
other. A daemon thread serves HTTP over a Unix domain socket; it answers `/health` also while the engine works. The
process ends itself when it has had no call for a while, and at SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from stages.engines.architecture import read_architecture
from stages.engines.file_lock import hold_exclusively
from stages.engines.launch import SOCKET_FOLDER_PREFIX, EngineRecord, HostFile
from stages.engines.registry import engine_factory
from stages.engines.wire import encode_error
from stages.errors import EngineError, StageError

if TYPE_CHECKING:
    from stages.engines.call_queue import CallQueue
    from stages.engines.protocol import Engine

_LOGGER = logging.getLogger(__name__)
_EXIT_GRACE_S = 4.0
"""Time for the engine to close before the process ends without it; less than the manager's patience after SIGTERM."""


class _Terminated(BaseException):
    """SIGTERM arrived; not an `Exception`, so that no handler for errors of the engine takes it."""


def main(arguments: list[str] | None = None) -> int:
    """Run an engine process until it is idle for too long or told to end; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages.engines.host", description="Serve one engine.")
    parser.add_argument("--launch", type=Path, required=True, help="launch file (JSON of HostFile)")
    host_file = HostFile.model_validate_json(parser.parse_args(arguments).launch.read_bytes())
    os.environ.update(host_file.launch.environment())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, _raise_terminated)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(host_file)
    except _Terminated:
        _LOGGER.info("ended by SIGTERM")
    except StageError as error:
        _LOGGER.exception("the engine did not start")
        _write_atomically(host_file.failure_path, encode_error(error))
        return 1
    finally:
        _remove_traces(host_file)
    return 0


def write_record(host_file: HostFile) -> EngineRecord:
    """Write and return the registry entry of this process."""
    record = EngineRecord(
        identity=host_file.launch.identity(),
        launch=host_file.launch,
        model_dir=host_file.model_dir,
        architecture=read_architecture(host_file.model_dir),
        pid=os.getpid(),
        process_started_at=psutil.Process().create_time(),
        socket=host_file.socket,
        log_path=host_file.log_path,
    )
    _write_atomically(host_file.record_path, record.model_dump_json(indent=2).encode())
    return record


def _serve(host_file: HostFile) -> None:
    from stages.engines.call_queue import CallQueue
    from stages.engines.http_server import serve_in_thread

    lock = hold_exclusively(host_file.folder / "process.lock", f"the engine process of {host_file.folder}")
    record = write_record(host_file)
    calls = CallQueue(host_file.launch.role)
    serve_in_thread(record, calls)
    engine = _build_engine(host_file)
    try:
        calls.run(engine, host_file.launch.idle_timeout_s)
        _LOGGER.info("no call for %s s: ending", host_file.launch.idle_timeout_s)
    finally:
        _close_within_grace(engine, calls)
        lock.close()


def _build_engine(host_file: HostFile) -> Engine:
    launch = host_file.launch
    _LOGGER.info("building %s engine %r for %s", launch.role, launch.name, host_file.model_dir)
    try:
        engine = engine_factory(launch.role, launch.name)(launch, host_file.model_dir)
    except StageError:
        raise
    except Exception as error:  # what a library raises while it builds a model can't be foreseen
        raise EngineError(
            f"{launch.role} engine {launch.name!r} did not start: {type(error).__name__}: {error}",
            engine=launch.name,
            cause=type(error).__name__,
        ) from error
    _LOGGER.info("ready: %s", engine.info())
    return engine


def _close_within_grace(engine: Engine, calls: CallQueue) -> None:
    watchdog = threading.Timer(_EXIT_GRACE_S, os._exit, args=(0,))
    watchdog.daemon = True
    watchdog.start()
    calls.refuse("the engine process is ending")
    with contextlib.suppress(_Terminated):
        engine.close()


def _remove_traces(host_file: HostFile) -> None:
    """Remove socket and record, unless a successor has already written its own."""
    with contextlib.suppress(OSError, ValueError):
        if EngineRecord.model_validate_json(host_file.record_path.read_bytes()).pid == os.getpid():
            host_file.record_path.unlink()
            host_file.socket.unlink()
            if host_file.socket.parent.name.startswith(SOCKET_FOLDER_PREFIX):
                host_file.socket.parent.rmdir()


def _write_atomically(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def _raise_terminated(signal_number: int, frame: object) -> None:
    del signal_number, frame
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated


def _exit_now(run: Callable[[], int]) -> None:
    """End the process without waiting for the threads of libraries."""
    code = run()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit_now(main)
