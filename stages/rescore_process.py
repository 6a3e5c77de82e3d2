"""Scoring again in a process of the engines' environment, where the libraries of the verifiers are.

Who asks (the command line, a task of Airflow) starts it here and reads a line for each iteration.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stages.errors import ContractError, EngineUnavailableError, StageError
from storage.layout import Split

BAD_INPUT: Final = 2
"""Exit code of a process that was asked for something it can't do."""


class RescoreRequest(BaseModel):
    """What is scored, with what, and where the scores go."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    root: str
    """Root of the run's home store."""
    run: str
    """Run name."""
    rewards: dict[str, Any]
    """Section `rewards`, as a job file has it."""
    target: str | None = None
    """Root of the results; null = in the run's own home store, under `name`."""
    name: str | None = None
    """Name of the scores within the run; exactly one of `target` and `name` is given."""
    split: Split = Split.TRAIN
    """Train or eval."""
    first: int = Field(default=0, ge=0)
    """First iteration (split eval: policy version)."""
    last: int | None = Field(default=None, ge=0)
    """Last iteration; null = the newest that there is."""

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if (self.target is None) is (self.name is None):
            raise ValueError("scores go to a folder (`target`) or under a name in the run (`name`); give one of them")
        if self.last is not None and self.last < self.first:
            raise ValueError(f"last {self.last} is below first {self.first}; give them in order")
        return self


class RescoreProcess:
    """One process that scores; a context manager, at whose end it runs no more."""

    def __init__(self, python: str, request: RescoreRequest, environment: Mapping[str, str]) -> None:
        """Keep what `__enter__` starts.

        Args:
            python: Interpreter of the engines' environment.
            request: What it is asked for.
            environment: Environment of the process.
        """
        self._python = python
        self._request = request
        self._environment = dict(environment)

    def __enter__(self) -> Self:
        """Start the process.

        Raises:
            EngineUnavailableError: the interpreter can't be started.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="motley-rescore-")
        file = Path(self._folder.name) / "request.json"
        file.write_text(self._request.model_dump_json(), encoding="utf-8")
        self._errors = (file.parent / "errors.txt").open("w+", encoding="utf-8")
        try:
            self._process = subprocess.Popen(
                [self._python, "-m", "stages.rescore", "--request", str(file)],
                stdout=subprocess.PIPE, stderr=self._errors, text=True, env=self._environment, start_new_session=True,
                cwd="/",  # not in the user's folder: a module that is found there only would be missing in the stages
            )  # fmt: skip
        except OSError as error:
            self._forget()
            message = f"scoring could not be started with {self._python}: {error}"
            raise EngineUnavailableError(message) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process, should it still run, and forget its files."""
        self.end()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._forget()

    def results(self) -> Iterator[dict[str, Any]]:
        """Yield what each iteration came to, as `stages.rescore.rescore` says it.

        Raises:
            ContractError: it was asked for something that can't be done; the message says what and why.
            StageError: it failed, or was ended.
        """
        for line in self._process.stdout or ():
            yield json.loads(line)
        code = self._process.wait()
        if code == 0:
            return
        self._errors.seek(0)
        said = self._errors.read().strip() or f"scoring ended with exit code {code}; what was scored stays, try again"
        raise ContractError(said) if code == BAD_INPUT else StageError(said)

    def _forget(self) -> None:
        self._errors.close()
        self._folder.cleanup()

    def end(self) -> None:
        """End the process and the verifiers below it; harmless when it has ended."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
