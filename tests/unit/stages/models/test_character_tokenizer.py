from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")


from transformers import AutoTokenizer

from stages.models.character_tokenizer import save_character_tokenizer, vocabulary

pytestmark = pytest.mark.engines


def test_vocabulary_counts_repeated_characters_once():
    assert vocabulary("0+0") == {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, "0": 4, "+": 5}


def test_character_tokenizer_survives_saving_and_gives_text_back(tmp_path):
    save_character_tokenizer("0123456789+=", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("12+3=") == [1, 5, 6, 14, 7, 15]
    assert tokenizer.encode("12+3=", add_special_tokens=False) == [5, 6, 14, 7, 15]
    assert tokenizer.decode([1, 5, 6, 14, 7, 15, 2], skip_special_tokens=True) == "12+3="
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_character_tokenizer_unknown_character_is_visible(tmp_path):
    assert save_character_tokenizer("01", tmp_path).encode("0x", add_special_tokens=False) == [4, 3]
