from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stages.contract import StageName, StageRequest
from stages.errors import ContractError, EngineUnavailableError
from stages.launch import StageAttempt, StageJob, all_attempts, stage_environment
from tests.helpers.stand_in_interpreter import write_interpreter

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


@pytest.fixture
def started() -> Iterator[list[StageAttempt]]:
    attempts: list[StageAttempt] = []
    yield attempts
    for attempt in attempts:
        attempt.end(grace_s=2.0)


def request_of(tmp_path: Path, iteration: int = 0) -> StageRequest:
    return StageRequest(
        stage=StageName.TRAIN, run="demo", iteration=iteration, root="file:///data", machine="box",
        state_dir=str(tmp_path / "state"), attempt="unnamed",
    )  # fmt: skip


def launch(
    tmp_path: Path, body: str, started: list[StageAttempt], **starter: int
) -> tuple[StageJob, StageAttempt, bool]:
    interpreter = write_interpreter(tmp_path / "python", body)
    request = request_of(tmp_path)
    job = StageJob.of(request, "train.box")
    attempt, is_new = job.attach_or_start(request, command=[str(interpreter)], environment=ENVIRONMENT, starter=starter)
    started.append(attempt)
    return job, attempt, is_new


def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the condition did not come true")


def test_job_folder_depends_on_inputs_and_row_and_not_on_the_attempt(tmp_path: Path) -> None:
    request = request_of(tmp_path)
    again = request.model_copy(update={"attempt": "other", "deadline_s": 5.0})
    assert StageJob.of(request, "train.box").folder == StageJob.of(again, "train.box").folder
    folders = {
        StageJob.of(request, "train.box").folder,
        StageJob.of(request, "train.other").folder,
        StageJob.of(request_of(tmp_path, iteration=1), "train.box").folder,
        StageJob.of(request.model_copy(update={"root": "file:///moved"}), "train.box").folder,
    }
    assert len(folders) == 4


def test_attempt_that_ends_in_order_leaves_result_and_log(tmp_path: Path, started: list[StageAttempt]) -> None:
    _, attempt, is_new = launch(tmp_path, "leave(artefacts=['demo/policies/1'])", started, try_number=1)
    until(lambda: not attempt.is_alive())
    result = attempt.result()
    assert is_new
    assert result is not None
    assert result.artefacts == ["demo/policies/1"]
    assert result.fingerprint == request_of(tmp_path).fingerprint()
    assert attempt.log_file.read_text() == "stage train at work\n"
    assert attempt.starter() == {"try_number": 1}
    assert all_attempts(tmp_path / "state") == [attempt]


def test_retry_while_the_process_runs_reattaches_and_starts_no_second_one(
    tmp_path: Path, started: list[StageAttempt]
) -> None:
    """A1, A4: the job is on disk before anybody polls, and another try finds it."""
    body = f"wait_for({str(tmp_path / 'go')!r}); leave()"
    job, first, _ = launch(tmp_path, body, started, try_number=1)
    _, second, is_new = launch(tmp_path, body, started, try_number=2)
    assert (second, is_new) == (first, False)
    assert [attempt.folder.name for attempt in job.attempts()] == ["attempt-001"]


def test_process_survives_its_starter_and_is_found_by_another_process(
    tmp_path: Path, started: list[StageAttempt]
) -> None:
    interpreter = write_interpreter(tmp_path / "python", f"wait_for({str(tmp_path / 'go')!r}); leave()")
    request = request_of(tmp_path)
    script = (
        "import os, sys\nfrom stages.contract import StageRequest\nfrom stages.launch import StageJob\n"
        f"request = StageRequest.model_validate_json({request.model_dump_json()!r})\n"
        f"StageJob.of(request, 'train.box').attach_or_start(request, command=[{str(interpreter)!r}], "
        "environment=dict(os.environ), starter={'try_number': 1})\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=False)
    assert done.returncode == -9
    job = StageJob.of(request, "train.box")
    until(lambda: job.live_attempt() is not None)
    found, is_new = job.attach_or_start(
        request, command=[str(interpreter)], environment=ENVIRONMENT, starter={"try_number": 2}
    )
    started.append(found)
    assert not is_new
    (tmp_path / "go").touch()
    until(lambda: found.result() is not None)


def test_finished_result_is_returned_to_the_same_starter_only(tmp_path: Path, started: list[StageAttempt]) -> None:
    """A cleared task or another try starts the stage again: the committed data decides, not the old result."""
    job, first, _ = launch(tmp_path, "leave()", started, try_number=1, clear_number=0)
    until(lambda: not first.is_alive())
    _, same, is_new = launch(tmp_path, "leave()", started, try_number=1, clear_number=0)
    assert (same, is_new) == (first, False)
    _, cleared, is_new = launch(tmp_path, "leave()", started, try_number=1, clear_number=1)
    assert is_new
    assert cleared.folder.name == "attempt-002"
    names = {StageRequest.model_validate_json(a.request_file.read_text()).attempt for a in job.attempts()}
    assert len(names) == 2


def test_killed_process_is_dead_without_result(tmp_path: Path, started: list[StageAttempt]) -> None:
    _, attempt, _ = launch(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", started)
    until(lambda: not attempt.is_alive())
    assert attempt.result() is None
    assert attempt.exit_status() == "was killed by SIGKILL"
    assert StageAttempt(attempt.folder).exit_status() == "disappeared"


def test_ending_an_attempt_ends_its_children_even_when_sigterm_is_ignored(
    tmp_path: Path, started: list[StageAttempt]
) -> None:
    body = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
    Path({str(tmp_path / "ready")!r}).touch()
    time.sleep(600)
    """
    _, attempt, _ = launch(tmp_path, body, started)
    until((tmp_path / "ready").exists)
    attempt.end(grace_s=0.2)
    child = int((tmp_path / "child").read_text())
    until(lambda: not attempt.is_alive())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert not attempt.is_alive()


def test_recorded_pid_of_another_process_does_not_count_as_alive(tmp_path: Path) -> None:
    folder = tmp_path / "attempt-001"
    folder.mkdir()
    (folder / "pid").write_text(str(os.getpid()))
    assert not StageAttempt(folder).is_alive()


def test_interpreter_that_does_not_exist_leaves_no_live_attempt(tmp_path: Path, started: list[StageAttempt]) -> None:
    request = request_of(tmp_path)
    attempt, _ = StageJob.of(request, "train.box").attach_or_start(
        request, command=[str(tmp_path / "missing")], environment=ENVIRONMENT, starter={}
    )
    until(lambda: not attempt.is_alive())
    assert attempt.exit_status() == "ended with exit code 127"
    assert "missing" in attempt.log_file.read_text()


def test_environment_that_cannot_be_passed_is_an_engine_error(tmp_path: Path) -> None:
    request = request_of(tmp_path)
    with pytest.raises(EngineUnavailableError, match="stage train could not be started"):
        StageJob.of(request, "train.box").attach_or_start(
            request, command=["x" * 4_000_000], environment=ENVIRONMENT, starter={}
        )


def test_result_that_is_no_result_is_refused(tmp_path: Path) -> None:
    attempt = StageAttempt(tmp_path)
    attempt.result_file.write_text('{"stage": "train"}')
    with pytest.raises(ContractError, match="does not match its schema"):
        attempt.result()


def test_owner_is_the_last_one_who_took_the_job(tmp_path: Path) -> None:
    job = StageJob(tmp_path)
    assert not job.is_owned_by("a")
    job.own("a")
    job.own("b")
    assert (job.is_owned_by("a"), job.is_owned_by("b")) == (False, True)


def test_stage_environment_drops_airflows_settings_and_marks_the_part() -> None:
    found = stage_environment({"PATH": "/bin", "AIRFLOW_HOME": "/a", "AIRFLOW__API_AUTH__JWT_SECRET": "s"})
    assert found == {"PATH": "/bin", "MOTLEY_PART": "stage", "PYTHONUNBUFFERED": "1"}
