"""Every type of source, for real: directories, a GGUF file that this test quantises, random models with a warm-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from plans.spec.llm import LlmShape
from stages.data.spec import DataSpec, TemplateSpec
from stages.errors import DataError, SpecFaultsError
from stages.models.dataset_rows import dataset_warm_up_rows
from stages.models.materialise import materialise
from stages.models.request import MaterialiseRequest
from stages.spec.source import GgufSource, HuggingFaceSource, InitSource, WarmUp
from storage.weights_hash import weights_hash
from tests.helpers.tiny_models import save_tiny_model

pytestmark = pytest.mark.engines

TINY = LlmShape(layers=2, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, vocab=16, tied=True)
ADDITION = DataSpec(source="arithmetic:addition", size=400)


def addition_rows(tokenizer):
    return dataset_warm_up_rows(ADDITION, TemplateSpec(), tokenizer)


def test_hf_directory_is_copied_byte_by_byte(tmp_path):
    origin = save_tiny_model(tmp_path / "origin")
    (origin / "notes.bin").write_bytes(b"a pickle")
    made = materialise(HuggingFaceSource(type="hf", path=str(origin)), MaterialiseRequest(shape=TINY), tmp_path / "out")
    names = sorted(path.name for path in made.directory.iterdir())
    assert names == sorted(path.name for path in origin.iterdir() if path.name != "notes.bin")
    assert all((made.directory / name).read_bytes() == (origin / name).read_bytes() for name in names)
    assert made.weights_hash == weights_hash({"model.safetensors": origin / "model.safetensors"})
    assert made.shape == TINY


def test_hf_directory_of_another_shape_is_refused_and_leaves_nothing(tmp_path):
    origin = save_tiny_model(tmp_path / "origin")
    request = MaterialiseRequest(shape=TINY.model_copy(update={"hidden": 128}))
    with pytest.raises(SpecFaultsError, match=r"hidden is 128, but the model in .* has 64"):
        materialise(HuggingFaceSource(type="hf", path=str(origin)), request, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["origin"]


@pytest.mark.parametrize("name", ["no/such/directory", "somebody/some-model", "../escape//"])
def test_hf_missing_model_says_what_to_do(tmp_path, monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"source\.path .* can't be used.*Give the directory of a model"):
        materialise(HuggingFaceSource(type="hf", path=name), MaterialiseRequest(shape=TINY), tmp_path / "out")


def test_hf_pickled_weights_are_never_loaded(tmp_path):
    origin = save_tiny_model(tmp_path / "origin")
    (origin / "model.safetensors").rename(origin / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pytorch_model\.bin is a pickle, which is never loaded"):
        materialise(HuggingFaceSource(type="hf", path=str(origin)), MaterialiseRequest(shape=TINY), tmp_path / "out")


def interleave(weight: torch.Tensor, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary dimensions, as its converter writes it."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).numpy()


LLAMA = LlmShape(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=300, tied=True)
_LLAMA_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    stem = name.removeprefix("model.").removesuffix(".weight")
    if not stem.startswith("layers."):
        return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[stem]
    _, layer, part = stem.split(".", 2)
    return f"blk.{layer}.{_LLAMA_NAMES[part]}.weight"


def write_gguf(path: Path, model, *, pre: str = "smollm") -> list[str]:
    """A small Llama with Q8_0 matrices and a byte-level tokenizer without merges; returns the tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 2), (writer.add_context_length, 128), (writer.add_embedding_length, 64),
        (writer.add_feed_forward_length, 128), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 5000.0),
    ):  # fmt: skip
        add(value)
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokens += [f"Ġx{index}" for index in range(300 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 297)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        data = interleave(value, heads) if heads else value.numpy()
        if data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


@pytest.fixture
def llama():
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def test_gguf_gives_the_model_and_tokenizer_that_were_quantised(tmp_path, llama):
    path = tmp_path / "model.gguf"
    write_gguf(path, llama)
    made = materialise(GgufSource(type="gguf", path=str(path)), MaterialiseRequest(shape=LLAMA), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(made.directory).eval()
    ids = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        # Q8_0 keeps 8 bits of each weight; a wrong order of rotary dimensions is off by far more.
        torch.testing.assert_close(loaded(ids).logits, llama(ids).logits, rtol=0, atol=0.02)
    tokenizer = AutoTokenizer.from_pretrained(made.directory)
    assert tokenizer.tokenize("12 ab\n") == ["1", "2", "Ġ", "ab", "Ċ"]
    assert tokenizer.decode(tokenizer.encode("12 é a\n")) == "12 é a\n"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.encode("</s>")) == (1, 2, [2])


def test_gguf_pre_tokenizer_decides_whether_digits_merge(tmp_path, llama):
    path = tmp_path / "model.gguf"
    write_gguf(path, llama, pre="mystery")
    with pytest.raises(
        DataError, match=r"pre-tokenizer 'mystery'; known are gpt2 with gpt-2, llama-bpe, qwen2, smollm"
    ):
        materialise(GgufSource(type="gguf", path=str(path)), MaterialiseRequest(shape=LLAMA), tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (GgufSource(type="gguf", path="/nowhere/model.gguf"), "is no file; give the path of a GGUF file"),
        (GgufSource(type="gguf", package="motley-no-such-package"), "is not installed in this environment"),
        (GgufSource(type="gguf", package="pytest"), "has 0 files like"),
        (GgufSource(type="gguf"), "exactly one of path and package"),
    ],
)
def test_gguf_missing_file_says_what_to_do(tmp_path, source, message):
    with pytest.raises(DataError, match=message):
        materialise(source, MaterialiseRequest(shape=LLAMA), tmp_path / "out")


def test_init_without_warm_up_is_random_by_seed(tmp_path):
    source = InitSource(type="init", warm_up=None)
    made = [
        materialise(source, MaterialiseRequest(shape=TINY, seed=seed), tmp_path / name)
        for seed, name in ((5, "a"), (5, "b"), (6, "c"))
    ]
    assert made[0].weights_hash == made[1].weights_hash != made[2].weights_hash
    assert made[0].facts == {}


def test_init_vocabulary_must_be_that_of_the_tokenizer(tmp_path):
    request = MaterialiseRequest(shape=TINY.model_copy(update={"vocab": 20}))
    with pytest.raises(SpecFaultsError, match=r"vocab is 20, but the tokenizer .* has 16 tokens .*; set vocab: 16"):
        materialise(InitSource(type="init"), request, tmp_path / "out")


def test_init_warm_up_stops_at_the_sampled_score_and_repeats_by_seed(tmp_path):
    source = InitSource(
        type="init", warm_up=WarmUp(target_score=0.002, check_every=10, batch_size=64, check_prompts=500)
    )
    reports: list[int] = []
    request = MaterialiseRequest(
        shape=TINY, warm_up_rows=addition_rows, report=lambda progress: reports.append(progress.step)
    )
    first = materialise(source, request, tmp_path / "a")
    second = materialise(source, request, tmp_path / "b")
    assert first.facts["warm_up_score"] >= 0.002
    assert first.facts["warm_up_steps"] % 10 == 0
    assert (first.weights_hash, first.facts) == (second.weights_hash, second.facts)
    assert reports[-1] == first.facts["warm_up_steps"]


def test_init_warm_up_that_misses_its_target_fails_with_the_score(tmp_path):
    source = InitSource(type="init", warm_up=WarmUp(target_score=0.99, max_steps=3, batch_size=8))
    with pytest.raises(SpecFaultsError, match=r"a score of 0\.\d+ in 3 optimizer steps, under target_score 0\.99"):
        materialise(source, MaterialiseRequest(shape=TINY, warm_up_rows=addition_rows), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_init_warm_up_rows_outside_the_alphabet_are_refused(tmp_path):
    source = InitSource(type="init", alphabet="01234567+=?!")
    with pytest.raises(DataError, match=r"rows have characters outside source\.alphabet"):
        materialise(source, MaterialiseRequest(shape=TINY, warm_up_rows=addition_rows), tmp_path / "out")


def run_child(folder: Path, **changes) -> int:
    spec = {"source": {"type": "init", "warm_up": None}, "shape": TINY.model_dump(), "data": ADDITION.model_dump()}
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps({**spec, **changes}))
    root = str(Path(__file__).parents[4])
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.run(
        [sys.executable, "-m", "stages.models", "--folder", str(folder)], env=environment, cwd=root, check=False
    ).returncode


def test_child_process_leaves_model_and_facts(tmp_path):
    assert run_child(tmp_path / "job") == 0
    facts = json.loads((tmp_path / "job/facts.json").read_text())
    weights = tmp_path / "job/model/model.safetensors"
    assert facts == {"shape": TINY.model_dump(), "weights_hash": weights_hash({"model.safetensors": weights})}
    assert load_file(weights)["model.embed_tokens.weight"].shape == (16, 64)


def test_child_process_leaves_its_failure(tmp_path):
    assert run_child(tmp_path / "job", source={"type": "gguf", "path": "/nowhere.gguf"}) == 1
    failure = json.loads((tmp_path / "job/failure.json").read_text())
    assert failure["type"] == "DataError"
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["failure.json", "spec.json"]


@pytest.mark.parametrize("content", [b"", b"not a gguf file", b"GGUF\x03\x00\x00\x00" + b"\x00" * 4])
def test_file_that_is_no_whole_gguf_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"model\.gguf is no whole GGUF file .*; fetch it again"):
        materialise(GgufSource(type="gguf", path=str(path)), MaterialiseRequest(shape=TINY), tmp_path / "out")
