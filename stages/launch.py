"""Detached stage processes: start one, find it again from another process, end it.

A job is "this stage of this iteration on this row with these inputs". Its folder's name follows from exactly that, so
whoever comes later (the retry of a task, a new scheduler after a crash) finds what an earlier starter left:

```
<state_dir>/jobs/<run>/<iteration>/<row>/<fingerprint>/
    lock              held (flock) while somebody looks or starts
    owner             token of the last one who started or attached
    attempt-001/      request.json  starter.json  pid  log.txt  result.json
    attempt-002/      ...
```
A process runs in a session of its own and outlives its starter. It is known by its pid together with its command line,
which names the attempt's request file, so a recycled pid is never taken for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pydantic import JsonValue, ValidationError

from stages.contract import StageRequest, StageResult
from stages.errors import ContractError, EngineUnavailableError
from stages.home import PART_VARIABLE

STAGE_PART = "stage"
"""Value of `MOTLEY_PART` for stage processes and all that they start."""

REQUEST_NAME = "request.json"
"""File name of the request inside an attempt's folder."""

RESULT_NAME = "result.json"
"""File name of the result, beside the request (see `stages.__main__`)."""

# The shell writes its own pid and then becomes the stage process, so that no moment exists at which a process runs
# whose pid is not on disk, even when the starter is killed.
_SCRIPT = 'echo $$ > "$1" && shift && exec "$@"'


@dataclass(frozen=True, slots=True)
class StageAttempt:
    """One process that was started for a job, alive or not."""

    folder: Path
    """Folder with the attempt's request, log and result."""
    child: subprocess.Popen[bytes] | None = field(default=None, compare=False)
    """Handle, when this very process started it; its death is reaped through it."""

    @property
    def request_file(self) -> Path:
        """The request."""
        return self.folder / REQUEST_NAME

    @property
    def result_file(self) -> Path:
        """The result; exists once the stage ended in order."""
        return self.folder / RESULT_NAME

    @property
    def log_file(self) -> Path:
        """Standard output and error of the process."""
        return self.folder / "log.txt"

    def starter(self) -> dict[str, JsonValue]:
        """Return what the starter said about itself."""
        with suppress(OSError, ValueError):
            content = json.loads((self.folder / "starter.json").read_text(encoding="utf-8"))
            if isinstance(content, dict):
                return content
        return {}

    def pid(self) -> int | None:
        """Return the recorded pid, or None when the process never came to life."""
        with suppress(OSError, ValueError):
            return int((self.folder / "pid").read_text(encoding="ascii"))
        return None

    def started_at(self) -> float:
        """Return when the process was started, Unix time; now, when that is not on disk yet."""
        try:
            return (self.folder / "starter.json").stat().st_mtime
        except FileNotFoundError:
            return time.time()

    def is_alive(self) -> bool:
        """Whether the process runs; a zombie or another process with the same pid does not count."""
        if self.child is not None:
            return self.child.poll() is None
        return self._process() is not None

    def exit_status(self) -> str:
        """Return how the process ended, for messages; only its own starter knows more than that it is gone."""
        code = self.child.poll() if self.child is not None else None
        if code is None:
            return "disappeared"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def result(self) -> StageResult | None:
        """Return the result, or None when there is none (yet).

        Raises:
            ContractError: the file is no stage result.
        """
        try:
            text = self.result_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            return StageResult.model_validate_json(text)
        except ValidationError as error:
            raise ContractError(f"stage result {self.result_file} does not match its schema: {error}") from error

    def end(self, *, grace_s: float = 5.0) -> None:
        """End the process group: first with SIGTERM, after `grace_s` with SIGKILL. Harmless when nothing runs."""
        pid = self.pid()
        if pid is None or not self.is_alive():
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(pid, number)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline:
                if not self.is_alive():
                    return
                time.sleep(0.05)

    def _process(self) -> psutil.Process | None:
        pid = self.pid()
        if pid is None:
            return None
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE or str(self.request_file) not in process.cmdline():
                return None
        except psutil.Error:
            return None
        return process


class StageJob:
    """All attempts at one stage of one iteration on one row with the same inputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, request: StageRequest, row: str) -> StageJob:
        """Return the job that a request belongs to.

        Args:
            request: The request; its attempt and deadline play no role.
            row: Task row, e.g. `generate.gpu-0`: tells the queues of one stage apart.
        """
        path = Path(request.state_dir) / "jobs" / request.run / f"{request.iteration:06d}" / row
        return cls(path / request.fingerprint()[:16])

    def attempts(self) -> list[StageAttempt]:
        """Return all attempts, oldest first."""
        return [StageAttempt(path) for path in sorted(self.folder.glob("attempt-*"))]

    def live_attempt(self) -> StageAttempt | None:
        """Return the attempt whose process runs and has not left its result yet."""
        return next((a for a in reversed(self.attempts()) if a.is_alive() and not a.result_file.exists()), None)

    def attach_or_start(
        self,
        request: StageRequest,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        starter: Mapping[str, JsonValue],
    ) -> tuple[StageAttempt, bool]:
        """Return the attempt to wait for and whether it was started by this call.

        A live process is attached to. A finished one is only taken when the same starter asks again: another try, or a
        cleared task, means that somebody wants the stage to look at the committed data again.

        Args:
            request: The request; its `attempt` is replaced by a fresh name when a process is started.
            command: Interpreter and its options, in front of `-m stages NAME --request FILE`.
            environment: Environment of the process.
            starter: Who asks, e.g. clear number and try number of the task.

        Raises:
            EngineUnavailableError: the process could not be started.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if (live := self.live_attempt()) is not None:
                return live, False
            attempts = self.attempts()
            if attempts and attempts[-1].result_file.exists() and attempts[-1].starter() == dict(starter):
                return attempts[-1], False
            folder = self.folder / f"attempt-{_next_number(attempts):03d}"
            return _start(folder, request, command, environment, starter), True

    def own(self, token: str) -> None:
        """Note who waits for the job now."""
        _write(self.folder / "owner", token)

    def is_owned_by(self, token: str) -> bool:
        """Whether nobody else has taken the job over since `own(token)`."""
        try:
            return (self.folder / "owner").read_text(encoding="utf-8") == token
        except FileNotFoundError:
            return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def all_attempts(state_dir: Path) -> list[StageAttempt]:
    """Return every attempt that a machine's state directory knows of, of all runs."""
    return [StageAttempt(path) for path in sorted((state_dir / "jobs").glob("*/*/*/*/attempt-*"))]


def remove_jobs(state_dir: Path, run: str) -> None:
    """Forget all jobs of a run; ends none."""
    shutil.rmtree(state_dir / "jobs" / run, ignore_errors=True)


def stage_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a stage process: no Airflow settings (they hold secrets), marked as a stage part."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("AIRFLOW_", "_AIRFLOW_"))}
    return kept | {PART_VARIABLE: STAGE_PART, "PYTHONUNBUFFERED": "1"}


def _next_number(attempts: Sequence[StageAttempt]) -> int:
    return 1 + (int(attempts[-1].folder.name.rpartition("-")[2]) if attempts else 0)


def _start(
    folder: Path,
    request: StageRequest,
    command: Sequence[str],
    environment: Mapping[str, str],
    starter: Mapping[str, JsonValue],
) -> StageAttempt:
    folder.mkdir()
    named = request.model_copy(update={"attempt": f"{folder.name}-{uuid.uuid4().hex[:8]}"})
    attempt = StageAttempt(folder)
    _write(attempt.request_file, named.model_dump_json(indent=1))
    _write(folder / "starter.json", json.dumps(dict(starter), sort_keys=True))
    stage = [*command, "-m", "stages", request.stage.value, "--request", str(attempt.request_file)]
    with attempt.log_file.open("ab") as log:
        try:
            child = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "sh", str(folder / "pid"), *stage],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise EngineUnavailableError(f"stage {request.stage} could not be started with {stage}: {error}") from error
    attempt = StageAttempt(folder, child)
    while attempt.pid() is None and attempt.is_alive():  # whoever gets the lock next must find it
        time.sleep(0.002)
    return attempt


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
