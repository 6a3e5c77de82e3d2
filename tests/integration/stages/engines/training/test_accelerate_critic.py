"""The critic engine: values and steps against plain torch, splits and ranks, resume."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

import torch
from transformers import AutoModelForTokenClassification

from stages.errors import ContractError, NumericsError
from stages.spec.execution import OptimizerSpec
from tests.helpers.critic_cases import critic_engine, critic_request, critic_rows, save_critic, scored
from tests.helpers.tiny_models import save_tiny_model

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def critic_dir(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("critic")
    return save_critic(save_tiny_model(base / "model", scale=1.0), base / "critic")


def train_and_close(critic_dir: Path, request, **options):
    """Outcome and weights after the request."""
    engine = critic_engine(critic_dir, **options)
    try:
        outcome = engine.train_critic(request)
        weights = {name: value.detach().clone() for name, value in engine._trainer.model.named_parameters()}
    finally:
        engine.close()
    return outcome, weights


def assert_equal_training(left, right) -> None:
    for name in ("value_loss", "grad_norm", "explained_variance", "value_clip_fraction"):
        ours, theirs = ([step.values[name] for step in outcome.steps] for outcome in (left[0], right[0]))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-6)
    for name, value in left[1].items():
        torch.testing.assert_close(value, right[1][name], rtol=0, atol=2e-5)


def plain_values(model, row) -> torch.Tensor:
    """Values of one row by the model's own forward pass."""
    ids = torch.tensor([[*row.prompt_token_ids, *row.completion_token_ids]])
    start = len(row.prompt_token_ids)
    return model(input_ids=ids).logits[0, start - 1 : -1, 0]


def test_values_equal_the_models_own_output_before_each_token(critic_dir):
    rows = critic_rows(7)
    engine = critic_engine(critic_dir)
    try:
        ours = engine.values(scored(rows))
    finally:
        engine.close()
    model = AutoModelForTokenClassification.from_pretrained(critic_dir, dtype=torch.float32).eval()
    for row, values in zip(rows, ours, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(values), plain_values(model, row), rtol=1e-4, atol=1e-5)


def test_one_step_equals_plain_torch(critic_dir):
    """Half the larger of both squared errors, summed over tokens, over all tokens of the step; torch's own AdamW."""
    optimizer = OptimizerSpec(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, eps=1e-3)
    rows = critic_rows(9)
    request = critic_request(rows, mini_batches=[list(range(9))], optimizer=optimizer)
    outcome, weights = train_and_close(critic_dir, request)
    model = AutoModelForTokenClassification.from_pretrained(critic_dir, dtype=torch.float32).eval()
    total = torch.zeros(())
    for row in rows:
        values, old, returns = plain_values(model, row), torch.tensor(row.old_values), torch.tensor(row.returns)
        bounded = old + (values - old).clamp(-0.2, 0.2)
        total = total + 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2).sum()
    loss = total / sum(len(row.returns) for row in rows)
    (0.5 * loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-3, betas=optimizer.betas, eps=optimizer.eps).step()
    assert outcome.steps[0].values["value_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, value in model.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=2e-6)


def test_n16_critic_training_does_not_depend_on_micro_batches(critic_dir):
    rows = critic_rows(13)
    results = [
        train_and_close(critic_dir, critic_request(rows, micro_batch_tokens=tokens)) for tokens in (1, 40, 100_000)
    ]
    assert_equal_training(results[0], results[1])
    assert_equal_training(results[0], results[2])


def test_critic_training_does_not_depend_on_the_number_of_ranks(critic_dir):
    # Three ranks and a mini-batch of two rows: one rank has none.
    request = critic_request(critic_rows(9), mini_batches=[list(range(7)), [7, 8]])
    one = train_and_close(critic_dir, request)
    three = train_and_close(critic_dir, request, num_processes=3)
    assert_equal_training(one, three)


def test_training_from_a_resume_point_goes_on_bit_for_bit(critic_dir, tmp_path):
    rows = critic_rows(8)
    first, second = critic_request(rows, mini_batches=[[0, 1, 2, 3]]), critic_request(rows, mini_batches=[[4, 5, 6, 7]])
    engine = critic_engine(critic_dir)
    try:
        engine.train_critic(first)
        engine.save(tmp_path / "model", tmp_path / "trainer", 1)
        straight = engine.train_critic(second)
        expected = engine.values(scored(rows))
    finally:
        engine.close()
    resumed = critic_engine(critic_dir)
    try:
        resumed.load_checkpoint(tmp_path / "model", tmp_path / "trainer", 1, "hash-1")
        again = resumed.train_critic(second)
        assert again.steps == straight.steps
        assert resumed.values(scored(rows)) == expected
    finally:
        resumed.close()


def test_a_critic_learns_its_targets(critic_dir):
    """Values follow the returns: the loss falls to a fraction, the explained variance rises towards 1."""
    rows = critic_rows(8, seed=3)
    steps = [list(range(8))] * 60
    request = critic_request(
        rows, mini_batches=steps, value_clip=None, optimizer=OptimizerSpec(learning_rate=3e-3), total_optimizer_steps=60
    )
    outcome, _ = train_and_close(critic_dir, request)
    losses = [step.values["value_loss"] for step in outcome.steps]
    variances = [step.values["explained_variance"] for step in outcome.steps]
    assert losses[-1] < 0.2 * losses[0]
    assert variances[-1] > 0.7 > variances[0]


def test_n15_non_finite_targets_skip_the_step_and_stop_after_k(critic_dir):
    rows = critic_rows(4)
    rows[1] = type(rows[1])(
        row_id="bad", prompt_token_ids=[1], completion_token_ids=[5], old_values=[0.0], returns=[float("nan")]
    )
    engine = critic_engine(critic_dir)
    try:
        before = engine.values(scored(rows))
        with pytest.raises(NumericsError) as raised:
            engine.train_critic(critic_request(rows, mini_batches=[[0, 1]] * 3))
        assert "bad" in raised.value.attributes["row_ids"]
        assert engine.values(scored(rows)) == before
    finally:
        engine.close()


def test_rows_with_targets_of_another_length_are_named(critic_dir):
    rows = critic_rows(2)
    rows[0] = type(rows[0])(
        row_id="short", prompt_token_ids=[1], completion_token_ids=[5, 6], old_values=[0.0], returns=[0.0, 1.0]
    )
    engine = critic_engine(critic_dir)
    try:
        with pytest.raises(ContractError, match="short has 1 old_values for 2 completion tokens"):
            engine.train_critic(critic_request(rows))
    finally:
        engine.close()
