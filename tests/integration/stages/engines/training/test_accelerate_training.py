"""The accelerate engine with one rank: numerics against plain torch, resume, skipped steps, saved files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.engines.protocol import ScoredTokens
from stages.errors import ContractError, EngineError, NumericsError
from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec
from stages.spec.execution import OptimizerSpec
from storage.weights_hash import weights_hash
from tests.helpers.tiny_models import save_tiny_model
from tests.helpers.training_cases import training_engine, training_request, training_rows

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), scale=1.0)


@pytest.fixture
def make_engine(model_dir):
    engines = []

    def make(directory: Path = model_dir, **options):
        engines.append(training_engine(directory, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def train_and_close(model_dir: Path, request, **options):
    """Outcome and weights after the request."""
    engine = training_engine(model_dir, **options)
    try:
        outcome = engine.train(request)
        weights = {name: value.detach().clone() for name, value in engine._trainer.model.named_parameters()}
    finally:
        engine.close()
    return outcome, weights


def metric(outcome, name: str) -> list[float]:
    return [step.values[name] for step in outcome.steps]


def assert_equal_training(left, right, tolerance: float = 2e-6) -> None:
    for name in ("loss", "grad_norm", "kl", "policy_loss", "importance_weight_mean", "entropy"):
        assert metric(left[0], name) == pytest.approx(metric(right[0], name), rel=1e-4, abs=tolerance)
    for name, value in left[1].items():
        torch.testing.assert_close(value, right[1][name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"])
@pytest.mark.parametrize("mode", ["none", "truncate", "mask"])
def test_n16_training_does_not_depend_on_the_micro_batch_size(model_dir, aggregation, mode):
    grpo = GrpoSpec(loss_aggregation=aggregation, kl={"weight": 0.1}, entropy_weight=0.01)
    correction = CorrectionSpec(mode=mode, floor=0.5 if mode == "mask" else 0.0)
    rows = training_rows(13, has_reference=True)
    results = [
        train_and_close(model_dir, training_request(rows, grpo=grpo, correction=correction, micro_batch_tokens=tokens))
        for tokens in (1, 40, 100_000)
    ]
    assert results[0][0].steps[0].values["num_micro_batches"] == 6.0
    assert results[2][0].steps[0].values["num_micro_batches"] == 1.0
    assert_equal_training(results[0], results[1])
    assert_equal_training(results[0], results[2])


def with_token_advantages(rows):
    return [
        replace(row, token_advantages=[row.advantage + 0.3 * place for place in range(len(row.completion_token_ids))])
        for row in rows
    ]


def test_n16_training_on_token_advantages_depends_on_neither_micro_batches_nor_ranks(model_dir):
    rows = with_token_advantages(training_rows(11))
    request = training_request(rows, grpo=GrpoSpec(loss="ppo"))
    whole = train_and_close(model_dir, replace(request, micro_batch_tokens=100_000))
    assert_equal_training(whole, train_and_close(model_dir, replace(request, micro_batch_tokens=1)))
    assert_equal_training(whole, train_and_close(model_dir, request, num_processes=2))


def test_equal_token_advantages_are_the_advantage_of_the_response(model_dir):
    rows = training_rows(6)
    by_token = [replace(row, token_advantages=[row.advantage] * len(row.completion_token_ids)) for row in rows]
    left = train_and_close(model_dir, training_request(rows))
    right = train_and_close(model_dir, training_request(by_token))
    assert_equal_training(left, right)


def test_token_advantages_of_another_length_are_named(make_engine):
    rows = training_rows(2)
    rows[1] = replace(rows[1], token_advantages=[0.0] * (len(rows[1].completion_token_ids) + 1))
    with pytest.raises(ContractError, match="token_advantages for"):
        make_engine().train(training_request(rows))


def reference_step(model_dir: Path, rows, optimizer: OptimizerSpec):
    """One on-policy GRPO step in plain torch: whole logits, one row at a time, torch's own AdamW."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total = torch.zeros(())
    for row in rows:
        ids = torch.tensor([[*row.prompt_token_ids, *row.completion_token_ids]])
        logits = model(input_ids=ids).logits[0] / row.temperature
        start = len(row.prompt_token_ids)
        chosen = torch.log_softmax(logits[start - 1 : -1], -1).gather(-1, ids[0, start:, None]).squeeze(-1)
        ratio = (chosen - chosen.detach()).exp()
        weights = (chosen.detach() - torch.tensor(row.sampler_logprobs)).exp().clamp(max=2.0)
        total = total - (ratio * row.advantage * weights).mean() / len(rows)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps).step()
    return float(total.detach()), float(norm), dict(model.named_parameters())


def test_train_one_step_equals_plain_torch(model_dir):
    optimizer = OptimizerSpec(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, eps=1e-3)
    rows = training_rows(9)
    request = training_request(rows, mini_batches=[list(range(9))], optimizer=optimizer)
    outcome, weights = train_and_close(model_dir, request)
    loss, norm, expected = reference_step(model_dir, rows, optimizer)
    assert metric(outcome, "loss") == pytest.approx([loss], abs=1e-6)
    assert metric(outcome, "grad_norm") == pytest.approx([norm], rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=2e-6)


def test_train_recompute_and_logit_chunks_change_nothing(model_dir):
    request = training_request(training_rows(8))
    plain = train_and_close(model_dir, request)
    saving = train_and_close(model_dir, request, recompute="full", logits_chunk_tokens=5)
    assert_equal_training(plain, saving)


def test_train_start_logprobs_are_the_scores_before_the_first_step(make_engine):
    engine = make_engine()
    rows = training_rows(8)
    scored = [
        ScoredTokens(
            prompt_token_ids=row.prompt_token_ids,
            completion_token_ids=row.completion_token_ids,
            temperature=row.temperature,
        )
        for row in rows
    ]
    before = engine.score(scored)
    outcome = engine.train(training_request(rows))
    for expected, found in zip(before, outcome.trainer_logprobs, strict=True):
        assert list(found) == pytest.approx(expected, abs=1e-5)
    assert engine.score(scored) != before


def test_train_single_step_makes_one_forward_pass_per_micro_batch(make_engine):
    engine = make_engine()
    calls = []
    engine._trainer.model.register_forward_pre_hook(lambda *_: calls.append("whole model"))
    engine._trainer.model.model.register_forward_pre_hook(lambda *_: calls.append("decoder"))
    rows = training_rows(6)
    outcome = engine.train(training_request(rows, mini_batches=[list(range(6))], micro_batch_tokens=40))
    assert calls == ["decoder"] * int(outcome.steps[0].values["num_micro_batches"])
    assert metric(outcome, "ratio_max") == [1.0]


def test_train_warm_up_rate_follows_the_step_of_the_run(make_engine):
    engine = make_engine()
    request = training_request(training_rows(4), optimizer=OptimizerSpec(learning_rate=1.0e-4, warm_up_steps=4))
    rates = [rate for _ in range(2) for rate in metric(engine.train(request), "learning_rate")]
    assert rates == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1.0e-4])


def save_number(engine, folder: Path, version: int) -> tuple[Path, Path]:
    paths = (folder / f"policy-{version}", folder / f"trainer-{version}")
    engine.save(*paths, version)
    return paths


RESUME_SCRIPT = """
import sys
from pathlib import Path
from tests.helpers.training_cases import training_engine, training_request, training_rows
folder, version, precision = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
engine = training_engine(folder / "policy-0", precision=precision)
engine.load_checkpoint(folder / f"policy-{version}", folder / f"trainer-{version}", version, "h")
engine.train(training_request(training_rows(8, seed=version)))
engine.save(folder / f"policy-{version + 1}", folder / f"trainer-{version + 1}", version + 1)
"""


def resume_in_a_fresh_process(folder: Path, version: int, precision: str) -> None:
    root = str(Path(__file__).parents[5])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", RESUME_SCRIPT, str(folder), str(version), precision],
        check=True,
        env=environment,
        cwd=root,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_c10_c11_training_resumed_twice_in_fresh_processes_equals_uninterrupted_bit_for_bit(
    model_dir, make_engine, tmp_path, precision
):
    engine = make_engine(precision=precision)
    whole, split = tmp_path / "whole", tmp_path / "split"
    for folder in (whole, split):
        folder.mkdir()
    save_number(engine, split, 0)
    engine.load_checkpoint(split / "policy-0", split / "trainer-0", 0, "h")
    for version in range(4):
        engine.train(training_request(training_rows(8, seed=version)))
        save_number(engine, whole, version + 1)
        if version == 1:
            save_number(engine, split, 2)
    resume_in_a_fresh_process(split, 2, precision)
    resume_in_a_fresh_process(split, 3, precision)
    for version in (3, 4):
        for name in ("policy-{}/model.safetensors", "trainer-{}/optimizer.safetensors"):
            expected, found = (load_file(folder / name.format(version)) for folder in (whole, split))
            assert sorted(expected) == sorted(found)
            for key, value in expected.items():
                assert torch.equal(value, found[key]), f"{name} {key}"
    counts = [json.loads((folder / "trainer-4/trainer.json").read_text()) for folder in (whole, split)]
    assert counts[0] == counts[1]
    assert counts[0]["optimizer_step"] == 8


def test_c14_resume_point_of_another_model_is_refused(make_engine, tmp_path):
    other = save_tiny_model(tmp_path / "other", layers=1)
    engine = make_engine(other)
    engine.train(training_request(training_rows(4)))
    _, trainer_dir = save_number(engine, tmp_path, 1)
    engine.close()
    engine = make_engine()
    with pytest.raises(ContractError, match="was saved from another model"):
        engine.load_checkpoint(engine_model_dir(engine), trainer_dir, 1, "h")
    assert engine.weights.unusable_reason is not None


def engine_model_dir(engine) -> Path:
    return Path(engine._settings.model_dir)


def test_load_checkpoint_of_another_shape_leaves_the_engine_usable(make_engine, tmp_path):
    other = save_tiny_model(tmp_path / "other", layers=1)
    engine = make_engine()
    with pytest.raises(EngineError, match="missing tensors"):
        engine.load_checkpoint(other, None, 1, "h")
    assert engine.info().policy_version == 0


def test_n15_non_finite_step_is_skipped_and_its_rows_are_named(make_engine):
    engine = make_engine()
    rows = training_rows(6)
    rows[4] = replace(rows[4], advantage=float("nan"))
    before = {name: value.detach().clone() for name, value in engine._trainer.model.named_parameters()}
    outcome = engine.train(training_request(rows, mini_batches=[[3, 4, 5]]))
    assert [step.is_skipped for step in outcome.steps] == [True]
    assert list(outcome.skipped_row_ids) == ["row-3", "row-4", "row-5"]
    for name, value in engine._trainer.model.named_parameters():
        assert torch.equal(value, before[name])
    outcome = engine.train(training_request(rows, mini_batches=[[0, 1, 2]]))
    assert [(step.optimizer_step, step.is_skipped) for step in outcome.steps] == [(1, False)]


def test_n15_too_many_non_finite_steps_in_a_row_end_the_call(make_engine):
    engine = make_engine()
    rows = [replace(row, advantage=float("inf")) for row in training_rows(4)]
    engine.train(training_request(rows, mini_batches=[[0, 1]]))
    with pytest.raises(NumericsError, match="2 optimizer steps in a row") as caught:
        engine.train(training_request(rows, mini_batches=[[2, 3], [0, 1]], max_non_finite_steps=2))
    assert caught.value.attributes["row_ids"] == ["row-2", "row-3"]
    good = engine.train(training_request(training_rows(4)))
    assert [step.is_skipped for step in good.steps] == [False, False]


def test_m1_masked_tokens_leave_numerator_and_denominator(make_engine):
    rows = [replace(row, sampler_logprobs=[-30.0] * len(row.sampler_logprobs)) for row in training_rows(4)]
    outcome = make_engine().train(training_request(rows, correction=CorrectionSpec(mode="mask", cap=2.0)))
    assert [(step.num_tokens, step.values["loss"], step.is_skipped) for step in outcome.steps] == [(0, 0.0, False)] * 2


def test_o3_memory_stays_flat_over_a_thousand_steps(make_engine):
    engine = make_engine()
    request = training_request(training_rows(2), mini_batches=[[0, 1]] * 100, total_optimizer_steps=1100)
    engine.train(request)
    before = psutil.Process().memory_info().rss
    for _ in range(10):
        engine.train(request)
    assert psutil.Process().memory_info().rss - before < 8 * 2**20


@pytest.mark.parametrize("tied", [True, False])
def test_save_writes_a_serving_directory_with_the_tokenizer(make_engine, tmp_path, tied):
    source = save_tiny_model(tmp_path / "source", tied=tied)
    engine = make_engine(source)
    engine.train(training_request(training_rows(4)))
    policy_dir, _ = save_number(engine, tmp_path, 7)
    assert engine.info().policy_version == 7
    with safe_open(policy_dir / "model.safetensors", framework="pt") as opened:
        names = set(opened.keys())
    assert ("lm_head.weight" in names) is not tied
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (policy_dir / name).read_bytes() == (source / name).read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(policy_dir)
    for name, value in engine._trainer.model.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], value)
    engine.load_weights(policy_dir, 8, weights_hash({"model.safetensors": policy_dir / "model.safetensors"}))
    assert engine.info().policy_version == 8


def test_save_in_bf16_serves_rounded_weights_and_resumes_from_exact_ones(make_engine, tmp_path):
    engine = make_engine(precision="bf16-mixed")
    engine.train(training_request(training_rows(4)))
    policy_dir, trainer_dir = save_number(engine, tmp_path, 1)
    exact = {name: value.detach().clone() for name, value in engine._trainer.model.named_parameters()}
    served = load_file(policy_dir / "model.safetensors")
    assert {value.dtype for value in served.values()} == {torch.bfloat16}
    engine.load_checkpoint(policy_dir, trainer_dir, 1, "h")
    for name, value in engine._trainer.model.named_parameters():
        assert torch.equal(value, exact[name])


def test_save_into_an_existing_directory_is_refused(make_engine, tmp_path):
    (tmp_path / "policy").mkdir()
    with pytest.raises(ContractError, match="fresh directories only"):
        make_engine().save(tmp_path / "policy", tmp_path / "trainer", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy"]


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 0.1), ("bf16", 0.1)])
def test_train_in_bf16_is_near_fp32(model_dir, precision, tolerance):
    request = training_request(training_rows(8))
    exact, _ = train_and_close(model_dir, request)
    rounded, _ = train_and_close(model_dir, request, precision=precision)
    assert metric(rounded, "loss") == pytest.approx(metric(exact, "loss"), abs=tolerance)
    assert metric(rounded, "grad_norm") == pytest.approx(metric(exact, "grad_norm"), rel=tolerance)


def test_close_refuses_later_calls(make_engine):
    engine = make_engine()
    engine.close()
    with pytest.raises(EngineError, match="it was closed"):
        engine.score([])
