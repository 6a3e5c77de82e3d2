from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plans.errors import SpecError, TooFewGpusError
from stages.__main__ import Terminated, exit_code_of, failure_of, main, read_request
from stages.contract import StageName, StageResult, StageStatus
from stages.errors import (
    ContractError,
    DataError,
    DeadlineError,
    EngineError,
    EngineUnavailableError,
    NumericsError,
    StaleRolloutError,
    WeightMismatchError,
)
from storage.errors import CorruptObjectError, StoreFullError, TransientStorageError


@pytest.mark.parametrize(
    ("error", "exit_code", "is_retryable"),
    [
        (EngineUnavailableError("x"), 1, True),
        (DeadlineError("x"), 1, True),
        (WeightMismatchError("x"), 1, True),
        (TransientStorageError("x", key="k"), 1, True),
        (Terminated("x"), 143, True),
        (EngineError("x"), 1, False),
        (NumericsError("x"), 1, False),
        (StaleRolloutError("x"), 1, False),
        (CorruptObjectError("x"), 1, False),
        (StoreFullError("x"), 1, False),
        (TooFewGpusError("x"), 1, False),
        (RuntimeError("x"), 1, False),
        (ContractError("x"), 2, False),
        (DataError("x"), 2, False),
        (SpecError("f", []), 2, False),
    ],
)
def test_error_becomes_exit_code_and_retry_decision(error: BaseException, exit_code: int, is_retryable: bool) -> None:
    failure = failure_of(error)

    assert exit_code_of(error) == exit_code
    assert failure.is_retryable is is_retryable
    assert failure.type == f"{type(error).__module__}.{type(error).__qualname__}"


def test_failure_keeps_attributes_that_json_can_hold() -> None:
    failure = failure_of(NumericsError("nan", row_ids=["a"], loss=float("nan"), path=Path("x")))

    assert failure.attributes == {"row_ids": ["a"], "loss": "nan", "path": "x"}


def request(folder: Path, **changes: Any) -> Path:
    document = {
        "stage": "generate", "run": "r", "iteration": 0, "root": str(folder / "store"), "machine": "local",
        "state_dir": str(folder / "state"), "attempt": "a1", **changes,
    }  # fmt: skip
    path = folder / "request.json"
    path.write_text(json.dumps(document))
    return path


def test_request_of_another_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="is for stage generate, but train was started"):
        read_request(request(tmp_path), StageName.TRAIN)


def test_unusable_request_names_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = request(tmp_path, iteration=-1, machine=3)

    assert main(["generate", "--request", str(path)]) == 2
    message = capsys.readouterr().err
    assert "iteration: " in message
    assert "machine: " in message


def test_stage_without_a_request_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate"]) == 2
    assert "needs --request FILE" in capsys.readouterr().err


def test_failure_leaves_a_result_beside_the_request(tmp_path: Path) -> None:
    path = request(tmp_path)

    assert main(["generate", "--request", str(path)]) == 2

    result = StageResult.model_validate_json((tmp_path / "result.json").read_bytes())
    assert (result.status, result.stage, result.run) == (StageStatus.FAILED, StageName.GENERATE, "r")
    assert result.error is not None
    assert result.error.type == "stages.errors.ContractError"
    assert "has no run 'r'" in result.error.message
    assert list(tmp_path.glob(".result*")) == []


#: The real process around work that never ends.
_STUCK = """
import sys, time
import stages.__main__ as process

def work(request, timer, deadline):
    with timer.phase("generate"):
        time.sleep(600)

process._work = work
process._end_process(process.main(sys.argv[1:]))
"""


def start_stuck(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _STUCK, "generate", "--request", str(path)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_terminated_process_leaves_a_retryable_result(tmp_path: Path) -> None:
    process = start_stuck(request(tmp_path))
    assert process.stderr is not None
    assert "start" in process.stderr.readline()  # logged once the handlers stand
    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=120) == 143
    result = StageResult.model_validate_json((tmp_path / "result.json").read_bytes())
    assert result.error is not None
    assert result.error.is_retryable
    assert result.error.message.startswith("stage generate was ended by SIGTERM in phase ")


def test_deadline_ends_the_process_and_names_the_phase(tmp_path: Path) -> None:
    process = start_stuck(request(tmp_path, deadline_s=0.5))

    assert process.wait(timeout=120) == 1
    result = StageResult.model_validate_json((tmp_path / "result.json").read_bytes())
    assert result.error is not None
    assert (result.error.type, result.error.is_retryable) == ("stages.errors.DeadlineError", True)
    assert result.error.attributes == {"phase": "generate", "deadline_s": 0.5}
