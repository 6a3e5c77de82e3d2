"""Engine processes for real: found again, replaced when dead, hung or foreign, ended when idle or told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

from stages.engines.client import RemoteEngine
from stages.engines.launch import EngineLaunch
from stages.engines.manager import EngineManager
from stages.engines.protocol import GenerationRequest, ScoredTokens
from stages.errors import (
    ContractError,
    DeadlineError,
    EngineError,
    EngineUnavailableError,
)
from tests.helpers.tiny_models import EOS_ID, save_tiny_model

pytestmark = pytest.mark.engines

START_TIMEOUT_S = 120.0


def make_launch(**changes: Any) -> EngineLaunch:
    fields: dict[str, Any] = {
        "role": "generation",
        "name": "transformers",
        "run": "manager-test",
        "machine": "here",
        "max_prompt_tokens": 32,
        "max_completion_tokens": 256,
        "max_num_seqs": 512,
    }
    return EngineLaunch(**{**fields, **changes})


def make_requests(num: int, max_tokens: int = 8) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_token_ids=[1, 5, 6], seed=seed, max_tokens=max_tokens, temperature=1.0, stop_token_ids=[EOS_ID]
        )
        for seed in range(num)
    ]


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended (a zombie of this process counts as ended)."""
    try:
        psutil.Process(pid).wait(timeout=60)
    except psutil.NoSuchProcess:
        return


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[EngineManager]:
    manager = EngineManager(tmp_path / "state")
    yield manager
    manager.stop_all()


@pytest.fixture
def engine(manager: EngineManager, model_dir: Path) -> RemoteEngine:
    engine = manager.acquire(make_launch(), model_dir, START_TIMEOUT_S)
    engine.load_weights(model_dir, 3, "hash-3")
    return engine


def test_engine_is_found_again_with_its_weights(
    manager: EngineManager, engine: RemoteEngine, model_dir: Path, tmp_path: Path
) -> None:
    completions = engine.generate(make_requests(20))
    other_manager = EngineManager(tmp_path / "state")
    again = other_manager.acquire(make_launch(), model_dir, START_TIMEOUT_S)
    assert again.record == engine.record
    assert again.info().policy_version == 3
    assert again.generate(make_requests(20)) == completions
    assert [record.pid for record in other_manager.list()] == [engine.record.pid]


def test_errors_come_back_with_class_and_attributes(engine: RemoteEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="can't be loaded") as refused:
        engine.load_weights(tmp_path / "nowhere", 4, "x")
    assert refused.value.attributes["directory"] == str(tmp_path / "nowhere")
    with pytest.raises(ContractError, match=r"request 0: seed is -1"):
        engine.generate([GenerationRequest(prompt_token_ids=[1], seed=-1, max_tokens=1, temperature=1.0)])
    with pytest.raises(EngineError, match="has no method 'train'"):
        engine.train(None)  # type: ignore[arg-type] # refused before it is looked at
    assert engine.info().policy_version == 3


def test_calls_of_several_clients_are_answered_one_by_one(
    manager: EngineManager, engine: RemoteEngine, model_dir: Path
) -> None:
    expected = engine.generate(make_requests(50))
    clients = [manager.acquire(make_launch(), model_dir, START_TIMEOUT_S) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda client: client.generate(make_requests(50)), clients))
    assert answers == [expected] * 4


def test_engine_outlives_the_process_that_started_it(manager: EngineManager, model_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stages.engines.launch import EngineLaunch; "
        "from stages.engines.manager import EngineManager; "
        "launch = EngineLaunch.model_validate_json(sys.argv[1]); "
        "print(EngineManager(Path(sys.argv[2])).acquire(launch, Path(sys.argv[3]), 120.0).record.pid)"
    )
    arguments = [make_launch().model_dump_json(), str(tmp_path / "state"), str(model_dir)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert manager.acquire(make_launch(), model_dir, START_TIMEOUT_S).record.pid == int(done.stdout)


def test_two_starters_at_once_start_one_engine(model_dir: Path, tmp_path: Path) -> None:
    managers = [EngineManager(tmp_path / "state") for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        engines = list(pool.map(lambda one: one.acquire(make_launch(), model_dir, START_TIMEOUT_S), managers))
    assert len({engine.record.pid for engine in engines}) == 1
    assert managers[0].stop_all() == 1


def test_killed_engine_is_replaced(manager: EngineManager, engine: RemoteEngine, model_dir: Path) -> None:
    os.kill(engine.record.pid, signal.SIGKILL)
    wait_for_end(engine.record.pid)
    replacement = manager.acquire(make_launch(), model_dir, START_TIMEOUT_S)
    assert replacement.record.pid != engine.record.pid
    assert replacement.info().policy_version is None


def test_engine_killed_during_a_call_names_pid_and_log(engine: RemoteEngine) -> None:
    killer = threading.Timer(0.3, os.kill, (engine.record.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(EngineUnavailableError) as caught:
        _generate_for_ever(engine)
    assert caught.value.attributes["pid"] == engine.record.pid
    assert caught.value.attributes["log"] == str(engine.record.log_path)


def _generate_for_ever(engine: RemoteEngine) -> None:
    while True:
        engine.generate(make_requests(512, max_tokens=256))


def test_call_past_its_deadline_names_the_engine(engine: RemoteEngine) -> None:
    """[W1] Every wait has a deadline and names the peer."""
    engine.call_timeout_s = 0.05
    with pytest.raises(DeadlineError, match=f"pid {engine.record.pid}.*did not answer 'generate'"):
        engine.generate(make_requests(512, max_tokens=256))


def test_hung_engine_is_replaced(
    manager: EngineManager, engine: RemoteEngine, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[W1] A process that is there but doesn't answer is ended."""
    monkeypatch.setattr("stages.engines.manager._ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setattr("stages.engines.process._TERMINATE_GRACE_S", 1.0)
    os.kill(engine.record.pid, signal.SIGSTOP)
    replacement = manager.acquire(make_launch(), model_dir, START_TIMEOUT_S)
    assert replacement.record.pid != engine.record.pid
    assert not psutil.pid_exists(engine.record.pid)


def test_record_of_a_foreign_process_is_not_believed(
    manager: EngineManager, engine: RemoteEngine, model_dir: Path
) -> None:
    """A pid that now belongs to somebody else is neither used nor ended."""
    folder = engine.record.log_path.parent
    foreign = engine.record.model_copy(update={"pid": os.getpid()})
    manager.stop(engine.record.identity)
    (folder / "engine.json").write_text(foreign.model_dump_json())
    assert manager.list() == []
    assert manager.acquire(make_launch(), model_dir, START_TIMEOUT_S).record.pid != os.getpid()


def test_engine_of_another_architecture_is_replaced(
    manager: EngineManager, engine: RemoteEngine, tmp_path: Path
) -> None:
    wide = save_tiny_model(tmp_path / "wide", hidden=96)
    replacement = manager.acquire(make_launch(), wide, START_TIMEOUT_S)
    replacement.load_weights(wide, 0, "wide")
    assert replacement.record.pid != engine.record.pid
    assert len(manager.list()) == 1


def test_engines_of_one_run_are_stopped_alone(manager: EngineManager, engine: RemoteEngine, model_dir: Path) -> None:
    engine.close()
    launch = make_launch(run="other")
    other = manager.acquire(launch, model_dir, START_TIMEOUT_S)
    assert {record.launch.run for record in manager.list()} == {"manager-test", "other"}
    assert manager.stop_all(run="other") == 1
    assert [record.launch.run for record in manager.list()] == ["manager-test"]
    with pytest.raises(EngineUnavailableError):
        other.info()


def test_idle_engine_ends_itself(manager: EngineManager, model_dir: Path) -> None:
    engine = manager.acquire(make_launch(idle_timeout_s=1.0), model_dir, START_TIMEOUT_S)
    wait_for_end(engine.record.pid)
    assert manager.list() == []
    assert not engine.record.socket.exists()


def test_sigterm_ends_an_engine_at_work(manager: EngineManager, engine: RemoteEngine) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, make_requests(512, max_tokens=256))
        os.kill(engine.record.pid, signal.SIGTERM)
        wait_for_end(engine.record.pid)
        assert call.exception() is None or isinstance(call.exception(), EngineUnavailableError)
    assert manager.list() == []


def test_start_failure_shows_the_cause_and_the_log(manager: EngineManager, model_dir: Path) -> None:
    with pytest.raises(EngineError, match=r"did not start: .*knows only `tile_rows`") as caught:
        manager.acquire(make_launch(options={"tile_rows": "many"}), model_dir, START_TIMEOUT_S)
    assert "End of the log" in str(caught.value)
    assert manager.list() == []


def test_interpreter_that_does_not_exist_is_named(manager: EngineManager, model_dir: Path) -> None:
    with pytest.raises(EngineError, match="can't be started with /no/python"):
        manager.acquire(make_launch(python="/no/python"), model_dir, START_TIMEOUT_S)


def test_start_past_its_deadline_leaves_no_process(manager: EngineManager, model_dir: Path) -> None:
    with pytest.raises(DeadlineError, match=r"pid \d+.*was not ready in time") as caught:
        manager.acquire(make_launch(), model_dir, timeout_s=0.3)
    assert not psutil.pid_exists(caught.value.attributes["pid"])


def test_long_state_directory_gets_a_short_socket(model_dir: Path, tmp_path: Path) -> None:
    manager = EngineManager(tmp_path / ("long-" * 30))
    engine = manager.acquire(make_launch(), model_dir, START_TIMEOUT_S)
    engine.load_weights(model_dir, 0, "h")
    rows = [ScoredTokens(prompt_token_ids=[1], completion_token_ids=[4, 5])]
    assert len(os.fsencode(engine.record.socket)) < 108
    assert len(engine.score(rows)[0]) == 2
    manager.stop_all()
    assert not engine.record.socket.parent.exists()
