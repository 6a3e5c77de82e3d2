"""The accelerate engine with several ranks: equal numbers, and failures that neither hang nor hide."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch", reason="needs the engines' environment")


from stages.engines.protocol import ScoredTokens
from stages.errors import EngineError, EngineUnavailableError, NumericsError
from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec
from tests.helpers.tiny_models import save_tiny_model
from tests.helpers.training_cases import training_engine, training_request, training_rows

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), scale=1.0)


@pytest.fixture
def two_ranks(model_dir):
    engine = training_engine(model_dir, num_processes=2)
    yield engine
    engine.close()
    assert engine.rank_pids == []


def outcome_with(model_dir: Path, num_processes: int, request):
    engine = training_engine(model_dir, num_processes=num_processes)
    try:
        outcome = engine.train(request)
        rows = [
            ScoredTokens(prompt_token_ids=row.prompt_token_ids, completion_token_ids=row.completion_token_ids)
            for row in request.rows
        ]
        return outcome, engine.score(rows)
    finally:
        engine.close()


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_training_does_not_depend_on_the_number_of_ranks(model_dir, mode):
    # Mini-batches of 7, 3 and 2 rows: unequal shares, and with three ranks one that has no row at all.
    request = training_request(
        training_rows(12, has_reference=True),
        mini_batches=[list(range(7)), [7, 8, 9], [10, 11], [0, 11, 5]],
        grpo=GrpoSpec(kl={"weight": 0.05}, entropy_weight=0.01),
        correction=CorrectionSpec(mode=mode),
    )
    alone, alone_scores = outcome_with(model_dir, 1, request)
    for num_ranks in (2, 3):
        together, scores = outcome_with(model_dir, num_ranks, request)
        for expected, found in zip(alone.steps, together.steps, strict=True):
            assert (found.num_rows, found.num_tokens) == (expected.num_rows, expected.num_tokens)
            for name in set(expected.values) - {"num_micro_batches", "padding_fraction"}:
                assert found.values[name] == pytest.approx(expected.values[name], rel=1e-4, abs=1e-5), name
        for left, right in ((alone.trainer_logprobs, together.trainer_logprobs), (alone_scores, scores)):
            assert [value for row in right for value in row] == pytest.approx(
                [value for row in left for value in row], abs=2e-5
            )


def test_numerics_error_is_raised_by_all_ranks_and_leaves_the_engine_usable(two_ranks):
    rows = training_rows(4)
    bad = [replace(row, advantage=float("nan")) for row in rows]
    with pytest.raises(NumericsError, match="in a row"):
        two_ranks.train(training_request(bad, max_non_finite_steps=1))
    assert [step.is_skipped for step in two_ranks.train(training_request(rows)).steps] == [False, False]


def test_save_and_load_keep_random_states_of_every_rank(two_ranks, tmp_path):
    two_ranks.train(training_request(training_rows(4)))
    two_ranks.save(tmp_path / "policy", tmp_path / "trainer", 1)
    assert sorted(path.name for path in (tmp_path / "trainer").iterdir()) == [
        "optimizer.safetensors", "random_rank_0.safetensors", "random_rank_1.safetensors", "trainer.json",
    ]  # fmt: skip
    two_ranks.load_checkpoint(tmp_path / "policy", tmp_path / "trainer", 1, "h")
    assert two_ranks.info().policy_version == 1


def test_exception_of_a_rank_reaches_the_caller_with_rank_and_cause(two_ranks, tmp_path):
    # Rank 1 may write no file larger than 4 KiB: its random state doesn't fit, while rank 0 waits for it.
    psutil.Process(two_ranks.rank_pids[0]).rlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with pytest.raises(EngineError, match=r"training rank 1 of 2 failed: .*File too large") as caught:
        two_ranks.save(tmp_path / "policy", tmp_path / "trainer", 1)
    assert caught.value.attributes["rank"] == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineError, match="can't be used any more"):
        two_ranks.train(training_request(training_rows(4)))


def test_exception_of_rank_0_ends_the_others(two_ranks, monkeypatch):
    pids = two_ranks.rank_pids

    def fail(request):
        raise MemoryError("no memory left")

    monkeypatch.setattr(two_ranks._trainer, "train", fail)
    with pytest.raises(EngineError, match="training rank 0 of 2 failed: MemoryError: no memory left"):
        two_ranks.train(training_request(training_rows(4)))
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_rank_that_was_killed_while_idle_makes_the_engine_unavailable(two_ranks):
    pid = two_ranks.rank_pids[0]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError, match="rank 1 was killed by SIGKILL"):
        two_ranks.train(training_request(training_rows(4)))


def test_rank_that_is_killed_during_training_makes_the_engine_unavailable(two_ranks):
    pid = two_ranks.rank_pids[0]
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    killer.start()
    try:
        with pytest.raises(EngineUnavailableError, match="rank 1 was killed by SIGKILL"):
            two_ranks.train(training_request(training_rows(8), mini_batches=[list(range(8))] * 5000))
    finally:
        killer.join()
    assert two_ranks.rank_pids == []


HOLDER = """
import os, sys, time
from pathlib import Path
from tests.helpers.training_cases import training_engine
engine = training_engine(Path(sys.argv[1]), num_processes=2)
os.write(int(sys.argv[2]), str(engine.rank_pids[0]).encode())
sys.stdin.read()
"""


def test_ranks_end_when_the_process_of_the_engine_dies(model_dir):
    root = str(Path(__file__).parents[5])
    reader, writer = os.pipe()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(model_dir), str(writer)],
        pass_fds=[writer], stdin=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    os.close(writer)
    rank = psutil.Process(int(os.read(reader, 64)))
    holder.kill()
    holder.communicate()
    rank.wait(timeout=60)
    assert not rank.is_running()
