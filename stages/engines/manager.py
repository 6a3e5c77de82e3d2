"""Engine processes of one machine: found again by identity, started once, replaced when dead, foreign or hung.

Every engine has a folder `<state_dir>/engines/<identity>` with its launch file, record, log and locks. Processes are
started in a session of their own and outlive the stage that started them. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from pydantic import JsonValue, ValidationError

import stages
from stages.engines.architecture import architecture_differences, read_architecture
from stages.engines.client import RemoteEngine, open_channel
from stages.engines.file_lock import exclusive
from stages.engines.launch import SOCKET_FOLDER_PREFIX, EngineLaunch, EngineRecord, HostFile
from stages.engines.process import describe_exit, end_process, find_process, log_tail
from stages.engines.wire import decode_error
from stages.errors import DeadlineError, EngineError, EngineUnavailableError, StageError

_ANSWER_TIMEOUT_S = 10.0
"""A process whose HTTP thread doesn't answer for this long counts as hung."""
_POLL_S = 0.05
_MAX_SOCKET_PATH_BYTES = 100
"""The kernel takes 107 bytes."""
_STOP_TIMEOUT_S = 30.0


class EngineManager:
    """Starts, finds and ends the engine processes of a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir.absolute()
        self._root = self._state_dir / "engines"
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def acquire(
        self, launch: EngineLaunch, model_dir: Path, timeout_s: float, call_timeout_s: float = 3600.0
    ) -> RemoteEngine:
        """Return a connection to the engine of this identity; start it where none is alive.

        Args:
            launch: What engine is wanted.
            model_dir: Model directory that gives the architecture; an engine of another one is replaced. Weights come
                with `load_weights` or `load_checkpoint`.
            timeout_s: Longest wait for the engine to be up, seconds.
            call_timeout_s: Deadline of each later call, seconds.

        Raises:
            EngineUnavailableError: The process was killed while it started.
            EngineError: It can't start; the end of its log is in the message.
            DeadlineError: It, or another starter of the same engine, was not done in time.
        """
        deadline = time.monotonic() + timeout_s
        architecture = read_architecture(model_dir)
        folder = self._prepare_folder(launch)
        what = f"the start of {launch.role} engine {launch.name!r}"
        with exclusive(folder / "start.lock", deadline, what):
            record = self._find(folder)
            if record is not None and not self._is_usable(record, architecture, deadline):
                self._end(record)
                record = None
            if record is None:
                record = self._start(launch, model_dir.absolute(), folder, deadline)
        return RemoteEngine(record, call_timeout_s)

    def list(self) -> list[EngineRecord]:
        """Return the records of all live engines, by identity."""
        folders = sorted(path for path in self._root.glob("*") if path.is_dir())
        records = (self._find(folder) for folder in folders)
        return [record for record in records if record is not None]

    def stop(self, identity: str) -> bool:
        """End the engine of that identity; False when there was none."""
        folder = self._root / identity
        if not folder.is_dir():
            return False
        with exclusive(folder / "start.lock", time.monotonic() + _STOP_TIMEOUT_S, f"engine {identity}"):
            record = self._find(folder)
            if record is not None:
                self._end(record)
            return record is not None

    def end(self, record: EngineRecord) -> None:
        """End an engine at once, also one that somebody waits for to start."""
        self._end(record)

    def stop_all(self, run: str | None = None) -> int:
        """End all engines, or those of one run; return how many there were."""
        chosen = [record for record in self.list() if run is None or record.launch.run == run]
        return sum(self.stop(record.identity) for record in chosen)

    def _prepare_folder(self, launch: EngineLaunch) -> Path:
        folder = self._root / launch.identity()
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise EngineError(
                f"no engine can be started below {self._root}: {error.strerror}; make it writable or use "
                "another state directory",
                state_dir=str(self._state_dir),
            ) from error
        return folder

    def _find(self, folder: Path) -> EngineRecord | None:
        """Return the record of a live process that belongs to the folder; remove what a dead one left."""
        path = folder / "engine.json"
        try:
            record = EngineRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValidationError, OSError):
            path.unlink(missing_ok=True)
            return None
        self._reap()
        if record.identity == folder.name and find_process(record.pid, record.process_started_at) is not None:
            return record
        _remove_traces(record, path)
        return None

    def _is_usable(self, record: EngineRecord, architecture: dict[str, JsonValue], deadline: float) -> bool:
        """Whether a live process is of the wanted architecture, answers, and is or becomes ready."""
        if architecture_differences(record.architecture, architecture):
            return False
        answered = time.monotonic()
        while time.monotonic() < deadline:
            state = _attach(record)
            if state is not None:
                answered = time.monotonic()
                if state.get("identity") != record.identity or state.get("unusable_reason") is not None:
                    return False
                if state.get("is_ready"):
                    return True
            elif time.monotonic() - answered > _ANSWER_TIMEOUT_S:
                return False
            if find_process(record.pid, record.process_started_at) is None:
                return False
            time.sleep(_POLL_S)
        raise DeadlineError(
            f"{record.describe()} was not ready in time. End of its log:\n{log_tail(record.log_path)}",
            pid=record.pid,
            log=str(record.log_path),
        )

    def _start(self, launch: EngineLaunch, model_dir: Path, folder: Path, deadline: float) -> EngineRecord:
        host_file = HostFile(launch=launch, model_dir=model_dir, folder=folder, socket=self._socket_path(launch))
        host_file.failure_path.unlink(missing_ok=True)
        launch_path = folder / "launch.json"
        launch_path.write_text(host_file.model_dump_json(indent=2))
        process = _spawn(host_file, launch_path)
        self._children[process.pid] = process
        try:
            return self._wait_until_ready(host_file, process, deadline)
        except BaseException:
            # Whoever waited gave up (deadline, error, Ctrl-C): a process nobody knows of must not stay behind.
            with contextlib.suppress(psutil.NoSuchProcess):
                end_process(psutil.Process(process.pid))
            process.wait()
            raise

    def _wait_until_ready(self, host_file: HostFile, process: subprocess.Popen[bytes], deadline: float) -> EngineRecord:
        launch = host_file.launch
        while time.monotonic() < deadline:
            record = self._find(host_file.folder)
            if record is not None:
                state = _attach(record)
                if state is not None and state.get("is_ready"):
                    return record
            elif process.poll() is not None:
                raise _start_failure(host_file, process)
            time.sleep(_POLL_S)
        raise DeadlineError(
            f"{launch.role} engine {launch.name!r} (pid {process.pid}, log {host_file.log_path}) was not ready in "
            f"time; raise engines.start_timeout_s. End of its log:\n{log_tail(host_file.log_path)}",
            pid=process.pid,
            log=str(host_file.log_path),
        )

    def _socket_path(self, launch: EngineLaunch) -> Path:
        path = self._root / f"{launch.identity()[:16]}.sock"
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
            return path
        return Path(tempfile.mkdtemp(prefix=SOCKET_FOLDER_PREFIX)) / "socket"

    def _end(self, record: EngineRecord) -> None:
        process = find_process(record.pid, record.process_started_at)
        if process is not None:
            end_process(process)
        self._reap()
        _remove_traces(record, self._root / record.identity / "engine.json")

    def _reap(self) -> None:
        """Take the exit status of own children that have ended, so that they don't stay as zombies."""
        self._children = {pid: child for pid, child in self._children.items() if child.poll() is None}


def _spawn(host_file: HostFile, launch_path: Path) -> subprocess.Popen[bytes]:
    launch = host_file.launch
    source_root = str(Path(stages.__file__).absolute().parents[1])
    search_path = os.pathsep.join(part for part in (source_root, os.environ.get("PYTHONPATH", "")) if part)
    if host_file.log_path.exists():
        host_file.log_path.replace(host_file.log_path.with_suffix(".previous.log"))
    try:
        with host_file.log_path.open("wb") as log:
            return subprocess.Popen(
                [launch.python, "-m", "stages.engines.host", "--launch", str(launch_path)],
                env={**os.environ, **launch.environment(), "PYTHONPATH": search_path},
                cwd=host_file.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise EngineError(
            f"{launch.role} engine {launch.name!r} can't be started with {launch.python}: {error.strerror}; "
            "give the interpreter of an environment that has the engine's libraries",
            python=launch.python,
        ) from error


def _start_failure(host_file: HostFile, process: subprocess.Popen[bytes]) -> StageError:
    """Turn the end of a starting process into an error: the host's own one where it left one."""
    launch = host_file.launch
    code = process.wait()
    kind: type[StageError] = EngineUnavailableError if code < 0 else EngineError
    reason = f"ended while it started ({describe_exit(code)})"
    with contextlib.suppress(OSError):
        failure = decode_error(host_file.failure_path.read_bytes())
        kind = type(failure) if type(failure) in (EngineError, EngineUnavailableError) else EngineError
        reason = f"did not start: {failure}"
    return kind(
        f"{launch.role} engine {launch.name!r} (pid {process.pid}) {reason}. Look into {host_file.log_path}, check "
        f"that {launch.python} has the engine's libraries and that memory suffices. End of the log:\n"
        f"{log_tail(host_file.log_path)}",
        pid=process.pid,
        log=str(host_file.log_path),
        exit_code=code,
    )


def _attach(record: EngineRecord) -> dict[str, object] | None:
    """Ask a process for its state and restart its idle time; None when it doesn't answer."""
    try:
        with open_channel(record.socket) as channel:
            answer = channel.post("/attach", timeout=_ANSWER_TIMEOUT_S)
            state = answer.json()
    except (httpx.TransportError, ValueError):
        return None
    return state if isinstance(state, dict) and state.get("pid") == record.pid else None


def _remove_traces(record: EngineRecord, record_path: Path) -> None:
    record_path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        record.socket.unlink()
        if record.socket.parent.name.startswith(SOCKET_FOLDER_PREFIX):
            record.socket.parent.rmdir()
