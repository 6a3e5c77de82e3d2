"""Training engines on several machines as one group: equal numbers, files on the first machine, failures in words."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

from stages.engines.protocol import ScoredTokens
from stages.engines.training.gang_calls import GangCalls
from stages.engines.training.rank_place import RankPlace
from stages.engines.training.rank_store import host_store, join_store
from stages.engines.training.ranks import interface_of
from stages.errors import EngineError, EngineUnavailableError, StageError
from tests.helpers.gang_engines import GangEngines
from tests.helpers.tiny_models import save_tiny_model
from tests.helpers.training_cases import training_engine, training_launch, training_request, training_rows

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), scale=1.0)


@pytest.fixture
def patience_s(request) -> float:
    """Longest wait of a rank for the others."""
    return getattr(request, "param", 600.0)


@pytest.fixture
def sharding(request) -> str:
    """Whether weights are spread over the ranks of all machines."""
    return getattr(request, "param", "none")


@pytest.fixture
def gang(model_dir, tmp_path, patience_s, sharding):
    # The plan lists the devices m0, m1, m0: rank order is the plan's, not that of the machines.
    launch = training_launch(num_processes=3, rank_timeout_s=patience_s, sharding=sharding)
    with GangEngines(tmp_path / "homes", launch, model_dir, [(0, 2), (1,)]) as engines:
        yield engines


@pytest.mark.parametrize("sharding", ["none", pytest.param("full", marks=pytest.mark.slow)], indirect=True)
def test_gang_trains_and_saves_as_one_engine_does(gang, model_dir, tmp_path):
    request = training_request(training_rows(12, has_reference=True), mini_batches=[list(range(7)), [7, 8, 9], [10]])
    rows = [
        ScoredTokens(prompt_token_ids=row.prompt_token_ids, completion_token_ids=row.completion_token_ids)
        for row in request.rows
    ]
    alone = training_engine(model_dir)
    try:
        expected, expected_scores = alone.train(request), alone.score(rows)
    finally:
        alone.close()

    outcomes = gang.each(lambda engine, _: engine.train(request))
    scores = gang.each(lambda engine, _: engine.score(rows))
    folders = [tmp_path / machine for machine in gang.place.machines]
    saved = gang.each(lambda engine, index: engine.save(folders[index] / "policy", folders[index] / "trainer", 1))

    for outcome in outcomes:
        for step, expected_step in zip(outcome.steps, expected.steps, strict=True):
            for name in ("loss", "grad_norm", "ratio_mean"):
                if name in expected_step.values:
                    assert step.values[name] == pytest.approx(expected_step.values[name], rel=1e-4, abs=1e-5), name
    for found in scores:
        assert [value for row in found for value in row] == pytest.approx(
            [value for row in expected_scores for value in row], abs=2e-5
        )
    assert saved == [None, None]
    # What rank 1 wrote on its machine lies on the first one, and nothing is left on the other.
    assert sorted(path.name for path in (folders[0] / "trainer").iterdir()) == [
        "optimizer.safetensors", "random_rank_0.safetensors", "random_rank_1.safetensors",
        "random_rank_2.safetensors", "trainer.json",
    ]  # fmt: skip
    assert (folders[0] / "policy" / "model.safetensors").is_file()
    assert not any(folders[1].rglob("*.*"))
    assert [engine.info().policy_version for engine in gang.engines] == [1, 1]
    paths = (folders[0] / "policy", folders[0] / "trainer")
    assert gang.each(lambda engine, _: engine.load_checkpoint(*paths, 1, "h")) == [None, None]


def test_engines_at_different_points_refuse_to_go_on(gang, tmp_path):
    request = training_request(training_rows(4))

    def call(engine, index):
        return engine.train(request) if index == 0 else engine.save(tmp_path / "policy", tmp_path / "trainer", 1)

    errors = gang.each(call)

    assert [type(error) for error in errors] == [EngineError, EngineError]
    assert "call 1 of the training gang is train() on m0 and save(1) on m1" in str(errors[0])
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize("patience_s", [120.0], indirect=True)  # all of it passes where death comes between calls
def test_engine_that_dies_ends_the_call_of_the_others(gang):
    request = training_request(training_rows(4))
    killer = threading.Timer(0.5, os.kill, (gang.engines[1].record.pid, signal.SIGKILL))
    killer.start()

    # The first machine begins a call to which the other never comes, or is in it when the other dies.
    results = []
    while not results or not any(isinstance(each, Exception) for each in results):
        results = gang.each(lambda engine, _: engine.train(request))

    assert isinstance(results[1], EngineUnavailableError)
    assert isinstance(results[0], StageError)


def test_late_member_of_another_gang_is_refused():
    store = host_store(RankPlace(num_ranks=2, token="run-3-e2", timeout_s=60))
    late = RankPlace(rank=1, num_ranks=2, port=store.port, token="run-3-e1", timeout_s=60)

    with pytest.raises(EngineError, match=r"belongs to gang run-3-e1, but .* gang run-3-e2 meets: a late member"):
        join_store(late)


def test_second_engine_of_a_machine_is_refused():
    store = host_store(RankPlace(num_ranks=2, token="t", timeout_s=60))
    place = RankPlace(rank=1, num_ranks=2, port=store.port, token="t", timeout_s=60)
    GangCalls(place, ("m0", "m1"), "m1")

    with pytest.raises(EngineError, match="m1 had another engine in training gang t"):
        GangCalls(place, ("m0", "m1"), "m1")


def test_store_listens_on_its_address_only():
    import psutil

    store = host_store(RankPlace(num_ranks=2, timeout_s=60))

    listening = [
        each.laddr.ip for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == store.port
    ]  # fmt: skip
    assert listening == ["127.0.0.1"]


def test_address_of_no_interface_is_named():
    with pytest.raises(EngineError, match=r"no network interface .* has the address 192\.0\.2\.7"):
        interface_of("192.0.2.7")
    with pytest.raises(EngineUnavailableError, match=r"can't listen on 192\.0\.2\.7 port 0"):
        host_store(RankPlace(host="192.0.2.7", num_ranks=2, timeout_s=60))
