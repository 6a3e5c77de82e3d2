"""Weights spread over ranks (FSDP2) train as one process does, and resume points know nothing of the spreading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

from torch.distributed.tensor import DTensor

from stages.engines.accelerate_engine import AccelerateEngine
from stages.errors import SpecFaultsError
from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec
from stages.spec.execution import LoraSpec
from tests.helpers.critic_cases import critic_engine, critic_request, critic_rows, save_critic, scored
from tests.helpers.tensor_checks import assert_equal_tensors, metrics_of, optimizer_state, tensors_of
from tests.helpers.tiny_models import save_tiny_model
from tests.helpers.training_cases import training_engine, training_launch, training_request, training_rows

pytestmark = pytest.mark.engines

ALONE: dict[str, Any] = {"num_processes": 1}
SHARDED: dict[str, Any] = {"num_processes": 2, "sharding": "full"}
METRICS = ("loss", "grad_norm", "kl", "entropy", "policy_loss", "ratio_mean", "importance_weight_mean")


def request_of(seed: int, **changes: Any) -> Any:
    """Seven rows, one row and three: the ranks have other numbers of passes, and one has no row at all."""
    fields = {
        "mini_batches": [list(range(7)), [7], [8, 9, 0]],
        "grpo": GrpoSpec(kl={"weight": 0.05}, entropy_weight=0.01),
        "correction": CorrectionSpec(mode="mask"),
        "micro_batch_tokens": 20,
    }
    return training_request(training_rows(10, seed=seed, has_reference=True), **{**fields, **changes})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), scale=1.0)


@pytest.fixture(scope="module")
def untied_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("untied"), scale=1.0, tied=False)


def train_twice(model_dir: Path, folder: Path, options: dict[str, Any]) -> list[Any]:
    """Outcomes of two requests; `policy-1`, `trainer-1` and `policy-2`, `trainer-2` in the folder."""
    engine = training_engine(model_dir, **options)
    try:
        outcomes = []
        for version in (1, 2):
            outcomes.append(engine.train(request_of(version)))
            engine.save(folder / f"policy-{version}", folder / f"trainer-{version}", version)
        return outcomes
    finally:
        engine.close()


def go_on(model_dir: Path, source: Path, folder: Path, options: dict[str, Any]) -> Any:
    """Outcome of the second request from another layout's resume point, which is first written again as `...-again`."""
    engine = training_engine(model_dir, **options)
    try:
        engine.load_checkpoint(source / "policy-1", source / "trainer-1", 1, "hash-1")
        engine.save(folder / "policy-again", folder / "trainer-again", 1)
        outcome = engine.train(request_of(2))
        engine.save(folder / "policy-2", folder / "trainer-2", 2)
        return outcome
    finally:
        engine.close()


def assert_same_training(left: Any, right: Any) -> None:
    for wanted, got in zip(metrics_of(left, METRICS), metrics_of(right, METRICS), strict=True):
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    for wanted, got in zip(left.trainer_logprobs, right.trainer_logprobs, strict=True):
        assert list(got) == pytest.approx(list(wanted), abs=1e-5)


def assert_same_files(left: Path, right: Path, version: int) -> None:
    policies = [tensors_of(folder / f"policy-{version}") for folder in (left, right)]
    assert_equal_tensors(*policies, absolute=1e-5)
    moments = [optimizer_state(folder / f"trainer-{version}") for folder in (left, right)]
    assert_equal_tensors(*moments, absolute=1e-6)


@pytest.mark.parametrize("model", ["model_dir", pytest.param("untied_dir", marks=pytest.mark.slow)])
def test_sharded_training_equals_one_process_and_goes_on_from_its_resume_points(request, tmp_path, model):
    directory = request.getfixturevalue(model)
    alone, sharded, mixed = (tmp_path / name for name in ("alone", "sharded", "mixed"))
    for folder in (alone, sharded, mixed):
        folder.mkdir()
    expected = train_twice(directory, alone, ALONE)
    found = train_twice(directory, sharded, SHARDED)
    for left, right in zip(expected, found, strict=True):
        assert_same_training(left, right)
    for version in (1, 2):
        assert_same_files(alone, sharded, version)
    # From one process to spread weights, and the way back.
    for source, options in ((alone, SHARDED), (sharded, ALONE)):
        folder = mixed / source.name
        folder.mkdir()
        assert_same_training(expected[1], go_on(directory, source, folder, options))
        assert_equal_tensors(tensors_of(folder / "policy-again"), tensors_of(source / "policy-1"), absolute=0.0)
        states = [optimizer_state(path) for path in (folder / "trainer-again", source / "trainer-1")]
        assert_equal_tensors(*states, absolute=0.0)
        assert_same_files(alone, folder, 2)


def test_a_rank_keeps_half_of_weights_gradients_and_moments(model_dir):
    engine = training_engine(model_dir, **SHARDED)
    try:
        engine.train(request_of(0))
        trainer = engine._trainer
        parameters = list(trainer.model.parameters())
        moments = [value for state in trainer.optimizer.state.values() for key, value in state.items() if key != "step"]
        assert all(isinstance(tensor, DTensor) for tensor in (*parameters, *moments))
        assert len(moments) == 2 * len(parameters)
        for tensors in (parameters, moments):
            here, whole = sum(t.to_local().numel() for t in tensors), sum(t.numel() for t in tensors)
            assert here == pytest.approx(whole / 2, rel=0.01)
    finally:
        engine.close()


def test_sharded_critic_equals_one_process(model_dir, tmp_path):
    critic_dir = save_critic(model_dir, tmp_path / "critic")
    rows = critic_rows(9)
    request = critic_request(rows, mini_batches=[list(range(6)), [6], [7, 8, 0]], micro_batch_tokens=20)
    found = []
    for name, options in (("alone", ALONE), ("sharded", SHARDED)):
        engine = critic_engine(critic_dir, **options)
        try:
            before = engine.values(scored(rows))
            outcome = engine.train_critic(request)
            engine.save(tmp_path / f"{name}-1", tmp_path / f"{name}-trainer", 1)
            found.append((before, metrics_of(outcome, ("value_loss", "grad_norm", "explained_variance"))))
        finally:
            engine.close()
    (alone_values, alone_metrics), (sharded_values, sharded_metrics) = found
    assert [v for row in sharded_values for v in row] == pytest.approx(
        [v for row in alone_values for v in row], abs=1e-5
    )
    for wanted, got in zip(alone_metrics, sharded_metrics, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert_equal_tensors(tensors_of(tmp_path / "alone-1"), tensors_of(tmp_path / "sharded-1"), absolute=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"), [({"precision": "bf16-mixed"}, 1e-2), ({"recompute": "full"}, 1e-5)], ids=str
)
def test_sharded_training_with_other_options_equals_one_process(model_dir, tmp_path, options, tolerance):
    outcomes = []
    for name, layout in (("alone", ALONE), ("sharded", SHARDED)):
        engine = training_engine(model_dir, **layout, **options)
        try:
            outcomes.append(engine.train(request_of(0)))
            engine.save(tmp_path / f"{name}-1", tmp_path / f"{name}-trainer", 1)
        finally:
            engine.close()
    for wanted, got in zip(*(metrics_of(outcome, METRICS) for outcome in outcomes), strict=True):
        assert got == pytest.approx(wanted, rel=tolerance, abs=tolerance)
    policies = (tensors_of(tmp_path / "alone-1"), tensors_of(tmp_path / "sharded-1"))
    assert_equal_tensors(*policies, absolute=tolerance)


def test_adapters_are_not_spread(model_dir):
    launch = training_launch(**SHARDED).model_copy(update={"lora": LoraSpec(rank=2)})
    with pytest.raises(SpecFaultsError, match="adapters are small"):
        AccelerateEngine(launch, model_dir)


def test_unknown_sharding_is_refused(model_dir):
    with pytest.raises(SpecFaultsError, match=r"options\.sharding: Input should be 'none' or 'full'"):
        AccelerateEngine(training_launch(sharding="zero"), model_dir)
