"""Tiny Qwen3 models with one token per character, written as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ALPHABET = "0123456789+="
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)


def save_tokenizer(directory: Path, alphabet: str = ALPHABET) -> int:
    """Write a character tokenizer; return its vocabulary size."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)
    return len(vocabulary)


def save_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    ffn: int = 128,
    positions: int = 512,
    scale: float = 4.0,
) -> Path:
    """Write a randomly initialised Qwen3 whose logits are spread out enough for errors to show; return `directory`.

    head_dim is 32, the least that vLLM's CPU attention takes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = save_tokenizer(directory)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        intermediate_size=ffn,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale if "embed" not in name else 2 * scale)
    model.save_pretrained(directory)
    return directory


def save_quickstart_model(directory: Path, seed: int = 0) -> Path:
    """Write a model of the quickstart's shape: 0.79 million parameters, vocabulary 16."""
    return save_tiny_model(directory, seed=seed, layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, scale=1.0)
