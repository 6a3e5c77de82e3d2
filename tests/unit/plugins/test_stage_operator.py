from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("airflow.sdk")

from airflow.sdk.exceptions import AirflowSkipException, DownstreamTasksSkipped

from plugins.stage_operator import PLANNED_STAGES, StageOperator
from stages.contract import StageName
from stages.errors import ContractError, DeadlineError, EngineUnavailableError, NumericsError
from stages.home import logical_date_of
from stages.launch import StageJob
from stages.run_entry import MachineEntry, RunEntry
from stages.stage_times import results_elsewhere
from tests.helpers.stand_in_interpreter import write_interpreter

BOX = MachineEntry(name="box", queue="gpu", region="local")
OTHER = MachineEntry(name="box2", queue="gpu2", region="local")


def entry(**changes: Any) -> RunEntry:
    facts = {"run": "demo", "roots": {"local": "file:///data"}, "machines": (BOX,), "iterations": 10}
    return RunEntry.model_validate(facts | changes)


def operator(stage: StageName = StageName.TRAIN, **changes: Any) -> StageOperator:
    return StageOperator(task_id=f"{stage.value}.gpu", entry=entry(**changes), stage=stage, machine=BOX)


def context(iteration: int = 0, try_number: int = 1, clear_number: int = 0, plan: Any = None) -> Any:
    pushed: dict[str, Any] = {}
    ti = SimpleNamespace(
        try_number=try_number, xcom_pull=lambda task_ids: plan, pushed=pushed,
        xcom_push=lambda key, value: pushed.update({key: value}),
    )  # fmt: skip
    dag_run = SimpleNamespace(logical_date=logical_date_of(iteration), clear_number=clear_number)
    return {"dag_run": dag_run, "ti": ti, "run_id": f"scheduled__demo.iter-{iteration:06d}"}


@pytest.fixture
def behave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    interpreter = tmp_path / "python"
    monkeypatch.setenv("MOTLEY_ENGINES_PYTHON", str(interpreter))

    def set_body(body: str) -> None:
        write_interpreter(interpreter, body)

    return set_body


def told(found: dict[str, Any]) -> dict[str, Any]:
    """What goes through XCom, apart from the times."""
    return {name: value for name, value in found.items() if name != "times"}


def job_of(task: StageOperator, iteration: int = 0) -> StageJob:
    return StageJob.of(task.request(iteration), task.task_id)


def until(condition: Callable[[], object]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the condition did not come true")


def test_operator_returns_references_only(behave: Callable[[str], None]) -> None:
    behave("leave(artefacts=['demo/policies/1/manifest.json'], metrics={'loss': 0.5}, reused=True)")
    found = operator().execute(context())
    times = found.pop("times")
    assert found == {"artefacts": ["demo/policies/1/manifest.json"], "reused": True}
    assert isinstance(times, dict)
    assert times["stage"] == "train"
    assert "metrics" not in times


def test_each_worker_runs_a_stage_in_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: pools have interpreters of their own; the task is made where none of them is known."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    task = operator()
    for worker in ("east", "west"):
        interpreter = tmp_path / f"python-of-{worker}"
        write_interpreter(interpreter, f"leave(artefacts=['demo/made-in-{worker}'])")
        monkeypatch.setenv("MOTLEY_HOME", str(tmp_path / worker))
        monkeypatch.setenv("MOTLEY_ENGINES_PYTHON", str(interpreter))

        assert task.execute(context())["artefacts"] == [f"demo/made-in-{worker}"]


def test_plan_passes_on_which_queues_have_work_and_skips_the_rows_of_the_others(behave: Callable[[str], None]) -> None:
    """In one go, so that no row without work waits for a worker."""
    behave("leave(metrics={'queues': {'train': ['gpu'], 'generate': ['gpu', 'gpu2'], 'infer': ['gpu2']}})")
    now = context(iteration=1)
    with pytest.raises(DownstreamTasksSkipped) as skipped:
        operator(StageName.PLAN, machines=(BOX, OTHER)).execute(now)
    assert skipped.value.tasks == [
        "prepare.gpu", "prepare.gpu2", "infer.gpu", "train.gpu2", "evaluate.gpu", "evaluate.gpu2"
    ]  # fmt: skip
    assert now["ti"].pushed["return_value"]["queues"]["train"] == ["gpu"]


def test_plan_skips_nothing_when_everything_has_work(behave: Callable[[str], None]) -> None:
    behave("leave(metrics={'queues': {'train': ['gpu']}})")
    found = operator(StageName.PLAN, iterations=1).execute(context(iteration=0))
    assert found["queues"] == {"train": ["gpu"]}


def test_report_is_told_what_other_machines_measured(behave: Callable[[str], None]) -> None:
    behave("leave()")
    times = {"stage": "generate", "run": "demo", "iteration": 2, "fingerprint": "f", "status": "ok",
             "started_at": 1.0, "ended_at": 3.0}  # fmt: skip
    report = operator(StageName.REPORT, machines=(BOX, OTHER))
    request = report.request(2, context(iteration=2, plan={"times": times}))
    assert [result.ended_at for result in results_elsewhere(request)] == [3.0] * len(PLANNED_STAGES)
    assert report.request(2).params == {}


def test_operator_request_has_machine_root_deadline_and_iteration(behave: Callable[[str], None]) -> None:
    behave("leave(metrics={'queues': json.loads(request.model_dump_json())})")
    asked = operator(StageName.COMMIT_POLICY, stage_deadline_s=77.0).execute(context(iteration=4))["queues"]
    assert isinstance(asked, dict)
    keys = ("stage", "run", "iteration", "root", "machine", "deadline_s", "params")
    assert [asked[key] for key in keys] == ["commit_policy", "demo", 4, "file:///data", "box", 77.0, {}]


def test_operator_raises_the_error_of_the_stage(behave: Callable[[str], None]) -> None:
    behave(
        "leave(status=StageStatus.FAILED, "
        "error=StageFailure(type='stages.errors.NumericsError', message='loss is NaN', "
        "attributes={'dump': 'rows.json'}, is_retryable=False))"
    )
    with pytest.raises(NumericsError, match="loss is NaN") as caught:
        operator().execute(context())
    assert caught.value.attributes == {"dump": "rows.json"}


def test_operator_notices_a_killed_stage_process(behave: Callable[[str], None]) -> None:
    behave("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(EngineUnavailableError, match="was killed by SIGKILL and left no result; its log is"):
        operator().execute(context())


def test_operator_refuses_the_result_of_another_request(behave: Callable[[str], None]) -> None:
    behave("leave(fingerprint='0' * 64)")
    with pytest.raises(ContractError, match="answers another request"):
        operator().execute(context())


def test_operator_refuses_a_failure_without_error(behave: Callable[[str], None]) -> None:
    behave("leave(status=StageStatus.FAILED)")
    with pytest.raises(ContractError, match="its error is None"):
        operator().execute(context())


def test_operator_ends_a_process_that_ignores_its_deadline(
    behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plugins.stage_operator.DEADLINE_MARGIN_S", 0.0)
    behave("time.sleep(600)")
    task = operator(stage_deadline_s=0.3)
    with pytest.raises(DeadlineError, match=r"did not end within 0\.3 s and was ended"):
        task.execute(context())
    assert job_of(task).live_attempt() is None


def test_another_try_reattaches_to_the_running_process(behave: Callable[[str], None], tmp_path: Path) -> None:
    """A1: the first try dies without a word, the next one finds the same process; nothing runs twice."""
    behave(f"wait_for({str(tmp_path / 'go')!r}); leave()")
    first = operator()
    request = first.request(0)
    job_of(first).attach_or_start(
        request,
        command=[str(tmp_path / "python")],
        environment={"PYTHONPATH": str(Path(__file__).parents[3])},
        starter={"try_number": 1},
    )
    outcome: list[Any] = []
    second = threading.Thread(target=lambda: outcome.append(operator().execute(context(try_number=2))))
    second.start()
    until(lambda: (job_of(first).folder / "owner").exists())
    (tmp_path / "go").touch()
    second.join(timeout=30)
    assert [told(found) for found in outcome] == [{"artefacts": [], "reused": False}]
    assert [a.folder.name for a in job_of(first).attempts()] == ["attempt-001"]


def test_cleared_task_runs_the_stage_again(behave: Callable[[str], None]) -> None:
    behave("leave()")
    task = operator()
    task.execute(context(clear_number=0))
    behave("leave(reused=True)")
    assert told(task.execute(context(clear_number=1))) == {"artefacts": [], "reused": True}
    assert len(job_of(task).attempts()) == 2


def test_killed_task_ends_its_process(behave: Callable[[str], None], tmp_path: Path) -> None:
    behave(f"Path({str(tmp_path / 'up')!r}).touch(); time.sleep(600)")
    task, caught = operator(), []

    def work() -> None:
        try:
            task.execute(context())
        except EngineUnavailableError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    until((tmp_path / "up").exists)
    until(lambda: (job_of(task).folder / "owner").exists())
    task.on_kill()
    thread.join(timeout=30)
    assert "was killed by SIGTERM" in caught[0]


def test_killed_task_leaves_a_process_that_another_try_has_taken_over(
    behave: Callable[[str], None], tmp_path: Path
) -> None:
    behave(f"Path({str(tmp_path / 'up')!r}).touch(); wait_for({str(tmp_path / 'go')!r}); leave()")
    task, outcome = operator(), []
    thread = threading.Thread(target=lambda: outcome.append(task.execute(context())))
    thread.start()
    until((tmp_path / "up").exists)
    until(lambda: (job_of(task).folder / "owner").exists())
    job_of(task).own("another try")
    task.on_kill()
    assert job_of(task).live_attempt() is not None
    (tmp_path / "go").touch()
    thread.join(timeout=30)
    assert [told(found) for found in outcome] == [{"artefacts": [], "reused": False}]


def test_on_kill_before_anything_was_started_is_harmless() -> None:
    assert operator().on_kill() is None


@pytest.mark.parametrize(
    ("stage", "iteration", "reason"),
    [
        (StageName.PREPARE, 1, "prepared in iteration 0"),
        (StageName.PROFILE, 1, "no measurement is due"),
        (StageName.EVALUATE, 1, "no evaluation is due"),
    ],
)
def test_row_without_work_is_skipped_without_a_process(
    behave: Callable[[str], None], tmp_path: Path, stage: StageName, iteration: int, reason: str
) -> None:
    behave("raise SystemExit(99)")
    with pytest.raises(AirflowSkipException, match=reason):
        operator(stage).execute(context(iteration=iteration))
    assert not (tmp_path / "home").exists()


def test_queue_without_share_in_the_plan_is_skipped(behave: Callable[[str], None]) -> None:
    behave("leave()")
    plan = {"queues": {"generate": ["gpu2"], "train": ["gpu"]}}
    with pytest.raises(AirflowSkipException, match="gives queue gpu nothing to generate"):
        operator(StageName.GENERATE, machines=(BOX, OTHER)).execute(context(plan=plan))
    assert operator(StageName.TRAIN, machines=(BOX, OTHER)).reason_to_skip(0, context(plan=plan)) is None


@pytest.mark.parametrize("stage", [StageName.PROFILE, StageName.TRAIN, StageName.WEIGHT_SYNC])
def test_rows_of_a_drained_machine_are_skipped(stage: StageName) -> None:
    machines = (OTHER, BOX)
    assert operator(stage, machines=machines, drained=("box",)).reason_to_skip(0, context()) == "machine box is drained"


@pytest.mark.parametrize("plan", [None, {"artefacts": []}])
def test_row_is_never_skipped_when_the_plan_does_not_say_so(plan: object) -> None:
    task = operator(StageName.TRAIN, machines=(BOX, OTHER))
    assert task.reason_to_skip(0, context(plan=plan)) is None


def test_training_on_a_single_machine_is_never_skipped() -> None:
    assert operator(StageName.TRAIN).reason_to_skip(0, context(plan={"queues": {"train": []}})) is None
