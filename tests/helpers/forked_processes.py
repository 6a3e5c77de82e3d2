"""Child processes forked from a warm one: `python -m NAME` without the seconds that importing torch takes.

A test that starts a dozen interpreters spends nearly all of its time importing. Within `forking`, what would start this
interpreter on a module forks instead: own process, own environment, own session, closed files; only the imports are
there already. Whatever else is started starts as ever.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

_REAL = subprocess.Popen


@contextmanager
def forking(*modules: str) -> Iterator[None]:
    """Import modules and let children be forked within the block. Nothing may have used threads of torch before."""
    for module in modules:
        importlib.import_module(module)
    before = subprocess.Popen
    subprocess.Popen = ForkedProcess  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


class ForkedProcess:
    """What callers here use of `subprocess.Popen`."""

    def __new__(cls, args: Sequence[str], **options: Any) -> Any:
        """Leave other commands to the real class."""
        is_module = [str(part) for part in args[:2]] == [sys.executable, "-m"]
        return super().__new__(cls) if is_module else _REAL(args, **options)

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None
        self.pid = os.fork()
        if self.pid == 0:
            _run([str(part) for part in args[2:]], **options)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it; the real class says 0 then too
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        ends_at = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if ends_at is not None and time.monotonic() > ends_at:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.02)
        return code

    def communicate(self, _: object = None, timeout: float | None = None) -> tuple[None, None]:
        self.wait(timeout)
        return None, None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def _run(
    arguments: list[str],
    *,
    env: dict[str, str] | None = None,
    cwd: Any = None,
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    start_new_session: bool = False,
    pass_fds: Sequence[int] = (),
) -> NoReturn:
    """Become `python -m NAME ARGUMENTS`."""
    code = 1
    try:
        if start_new_session:
            os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        _take_files(stdin, stdout, stderr, pass_fds)
        if cwd is not None:
            os.chdir(cwd)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001 - the process boundary
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_files(stdin: Any, stdout: Any, stderr: Any, kept: Sequence[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    out = _descriptor(stdout, 1, nothing)
    error = out if stderr is subprocess.STDOUT else _descriptor(stderr, 2, nothing)
    copies = [os.dup(each) for each in (_descriptor(stdin, 0, nothing), out, error)]
    for target, source in enumerate(copies):
        os.dup2(source, target)
    start = 3
    for number in sorted(kept):
        os.closerange(start, number)
        start = number + 1
    os.closerange(start, 4096)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _descriptor(wanted: Any, own: int, nothing: int) -> int:
    if wanted is None:
        return own
    if wanted is subprocess.DEVNULL:
        return nothing
    return wanted if isinstance(wanted, int) else int(wanted.fileno())
