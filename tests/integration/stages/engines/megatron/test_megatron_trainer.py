"""What of the megatron trainer the comparison of layouts does not show: log-probs, bf16, skipped steps, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")
pytest.importorskip("megatron.core", reason="needs the extra megatron")

import torch
from transformers import AutoModelForCausalLM

from stages.engines.megatron.layout import MegatronLayout
from stages.engines.megatron.options import MegatronOptions, megatron_settings
from stages.engines.megatron.trainer import MegatronSettings
from stages.engines.protocol import ScoredTokens
from stages.errors import EngineError, SpecFaultsError
from tests.helpers.critic_cases import edit_config
from tests.helpers.megatron_cases import megatron_launch, save_family_model
from tests.helpers.rank_pool import LayoutJob, RankPool
from tests.helpers.tensor_checks import assert_equal_tensors, tensors_of
from tests.helpers.training_cases import training_engine, training_request, training_rows

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

TWO_BY_TWO = MegatronLayout(tp=2, stage_layers=(1, 2), shares=(1,))
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_family_model(tmp_path_factory.mktemp("model"), "qwen3", layers=3)


def settings_of(model_dir: Path, layout: MegatronLayout = TWO_BY_TWO, **changes) -> MegatronSettings:
    return MegatronSettings(model_dir=str(model_dir), layout=layout, **changes)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {"tied": True}), ("llama", {"tied": False}), ("llama", {"rope_parameters": LLAMA3_ROPE})],
    ids=["qwen3", "llama", "llama3 rope"],
)
def test_logprobs_are_those_of_transformers_whole_logits(pool, tmp_path, family, changes):
    model_dir = save_family_model(tmp_path / "model", family, layers=3, **changes)
    rows = [
        ScoredTokens(prompt_token_ids=row.prompt_token_ids, completion_token_ids=row.completion_token_ids)
        for row in training_rows(6)
    ]

    (found,) = pool.run(LayoutJob(settings=settings_of(model_dir), calls=[("score", (rows,))]))

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for row, logprobs in zip(rows, found, strict=True):
        ids = torch.tensor([[*row.prompt_token_ids, *row.completion_token_ids]])
        with torch.no_grad():
            whole = model(input_ids=ids).logits[0].log_softmax(-1)
        start = len(row.prompt_token_ids)
        expected = whole[start - 1 : -1].gather(-1, ids[0, start:, None]).squeeze(-1)
        assert logprobs == pytest.approx(expected.tolist(), abs=2e-5)


def test_weights_go_through_a_layout_bit_for_bit_and_transformers_loads_them(pool, model_dir, tmp_path):
    paths = (str(tmp_path / "policy"), str(tmp_path / "trainer"))

    pool.run(LayoutJob(settings=settings_of(model_dir), calls=[("save", (*paths, 1))]))

    written = tensors_of(tmp_path / "policy")
    assert_equal_tensors(written, tensors_of(model_dir), absolute=0.0)
    assert sorted(path.name for path in (tmp_path / "policy").glob("model*")) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    index = json.loads((tmp_path / "policy" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(written)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    assert_equal_tensors({name: loaded.state_dict()[name] for name in written}, written, absolute=0.0)
    assert (tmp_path / "policy" / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()


def test_accelerate_goes_on_from_the_resume_point_of_a_layout(pool, model_dir, tmp_path):
    requests = [training_request(training_rows(8, seed=seed)) for seed in (1, 2)]
    paths = (tmp_path / "policy", tmp_path / "trainer")
    calls = [("train", (requests[0],)), ("save", (*map(str, paths), 1)), ("train", (requests[1],))]

    outcome = pool.run(LayoutJob(settings=settings_of(model_dir), calls=calls))[2]

    engine = training_engine(model_dir)
    try:
        engine.load_checkpoint(*paths, 1, "hash-1")
        resumed = engine.train(requests[1])
    finally:
        engine.close()
    assert [step.optimizer_step for step in resumed.steps] == [step.optimizer_step for step in outcome.steps] == [2, 3]
    for left, right in zip(resumed.steps, outcome.steps, strict=True):
        assert left.values["loss"] == pytest.approx(right.values["loss"], abs=1e-5)
        assert left.values["grad_norm"] == pytest.approx(right.values["grad_norm"], rel=1e-5)


def test_bf16_mixed_goes_on_from_its_fp32_weights_in_another_layout(pool, model_dir, tmp_path):
    """Rounded weights alone would lose updates smaller than a 256th of a weight."""
    requests = [training_request(training_rows(8, seed=seed)) for seed in (1, 2)]
    paths = (str(tmp_path / "policy"), str(tmp_path / "trainer"))
    mixed = {"precision": "bf16-mixed", "serving_dtype": "bf16"}
    whole = MegatronLayout(tp=1, stage_layers=(3,), shares=(2, 1))

    calls = [("train", (requests[0],)), ("save", (*paths, 1)), ("train", (requests[1],))]
    went_on = pool.run(LayoutJob(settings=settings_of(model_dir, **mixed), calls=calls))[2]
    calls = [("load_checkpoint", paths), ("train", (requests[1],)), ("save", (f"{paths[0]}-2", f"{paths[1]}-2", 2))]
    resumed = pool.run(LayoutJob(settings=settings_of(model_dir, whole, **mixed), calls=calls))[1]

    for left, right in zip(went_on.steps, resumed.steps, strict=True):
        assert left.values["loss"] == pytest.approx(right.values["loss"], abs=0.02)
        assert left.values["grad_norm"] == pytest.approx(right.values["grad_norm"], rel=0.05)
    full = tensors_of(tmp_path / "policy")
    assert {tensor.dtype for tensor in full.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == "bfloat16"
    assert sorted(path.name for path in (tmp_path / "trainer").glob("weights*")) == [
        "weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors",
    ]  # fmt: skip


def test_non_finite_step_is_skipped_on_every_rank(pool, model_dir, tmp_path):
    rows = training_rows(6)
    rows[4] = replace(rows[4], advantage=float("nan"))
    layout = MegatronLayout(tp=1, stage_layers=(2, 1), shares=(1, 1))
    paths = (str(tmp_path / "policy"), str(tmp_path / "trainer"))
    bad = training_request(rows, mini_batches=[[3, 4, 5]])
    good = training_request(rows, mini_batches=[[0, 1, 2]])

    outcomes = pool.run(
        LayoutJob(
            settings=settings_of(model_dir, layout),
            calls=[("train", (bad,)), ("save", (*paths, 1)), ("train", (good,))],
        )
    )

    assert [step.is_skipped for step in outcomes[0].steps] == [True]
    assert list(outcomes[0].skipped_row_ids) == ["row-3", "row-4", "row-5"]
    assert_equal_tensors(tensors_of(tmp_path / "policy"), tensors_of(model_dir), absolute=0.0)
    assert [(step.optimizer_step, step.is_skipped) for step in outcomes[2].steps] == [(1, False)]


def test_launch_that_the_model_cannot_be_split_by_names_every_fault(model_dir):
    launch = megatron_launch().model_copy(update={"gpus": ("here/0", "here/1")})
    options = MegatronOptions(tensor_parallel=3, stage_layers=(2,), replica_samples=(0,), precision="bf16")

    with pytest.raises(SpecFaultsError) as caught:
        megatron_settings(launch, options, model_dir)

    assert [fault.split(" ")[0] for fault in caught.value.faults] == [
        "tensor_parallel", "tensor_parallel", "stage_layers", "replica_samples", "3", "precision",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen2"}, "its family is qwen2"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "attention_bias is true; hidden_act is gelu"),
    ],
)
def test_model_that_the_engine_does_not_compute_is_refused_by_name(tmp_path, changes, named):
    model_dir = save_family_model(tmp_path / "model", "qwen3", layers=1)
    edit_config(model_dir, **changes)

    with pytest.raises(EngineError, match=named):
        megatron_settings(megatron_launch(), MegatronOptions(), model_dir)
