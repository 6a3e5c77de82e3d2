"""Rendering and encoding of prompts with real tokenizers."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402 - transformers checked first

from stages.data.rows import PromptRow  # noqa: E402
from stages.data.spec import TemplateSpec  # noqa: E402
from stages.data.template import EncodedPrompt, PromptEncoder, tokenizer_hash  # noqa: E402
from stages.errors import DataError  # noqa: E402

pytestmark = pytest.mark.engines
VOCABULARY = ["<unk>", "<s>", "</s>", "[user]", "[assistant]", "[system]", "a", "b", "c", "Q", "A", ":"]
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # fmt: skip # noqa: E501 - one template
BOS = 1


def make_tokenizer(*, adds_bos: bool = True, has_bos: bool = True, chat: str | None = CHAT):
    words = {word: place for place, word in enumerate(VOCABULARY)}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>" if has_bos else None, eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = chat
    return tokenizer


def row(prompt: object) -> PromptRow:
    return PromptRow(prompt_id="e/1", environment="e", prompt=prompt, answer="a")


def ids(*words: str) -> tuple[int, ...]:
    return tuple(VOCABULARY.index(word) for word in words)


def encode(prompt: object, tokenizer=None, **spec: object) -> EncodedPrompt:
    return PromptEncoder(TemplateSpec.model_validate(spec), tokenizer or make_tokenizer()).encode(row(prompt))


def test_plain_prompt_goes_into_the_format_and_gets_one_bos() -> None:
    encoded = encode("a b", prompt_format="Q : {prompt} A :")
    assert encoded == EncodedPrompt(
        prompt_id="e/1", text="Q : a b A :", token_ids=ids("<s>", "Q", ":", "a", "b", "A", ":")
    )


def test_braces_of_the_prompt_are_not_interpreted() -> None:
    assert encode("{x} {prompt}", prompt_format="Q {prompt}").text == "Q {x} {prompt}"


@pytest.mark.parametrize("bos", ["auto", "always"])
@pytest.mark.parametrize("prompt", ["a", "<s> a", "<s> <s> a"])
def test_k7_plain_prompt_has_exactly_one_bos(bos: str, prompt: str) -> None:
    assert encode(prompt, bos=bos).token_ids == ids("<s>", "a")


@pytest.mark.parametrize("bos", ["auto", "always"])
def test_k7_chat_template_that_renders_a_bos_gives_exactly_one(bos: str) -> None:
    encoded = encode("a", kind="chat", bos=bos)
    assert encoded.text == "<s>[user] a [assistant]"
    assert encoded.token_ids == ids("<s>", "[user]", "a", "[assistant]")


def test_chat_template_without_bos_gets_none_unless_asked_for() -> None:
    template = CHAT.replace("{{ bos_token }}", "")
    assert encode("a", kind="chat", chat_template=template).token_ids == ids("[user]", "a", "[assistant]")
    assert encode("a", kind="chat", chat_template=template, bos="always").token_ids[:2] == ids("<s>", "[user]")


def test_bos_never_removes_even_the_rendered_one() -> None:
    assert encode("a", kind="chat", bos="never").token_ids == ids("[user]", "a", "[assistant]")


def test_tokenizer_without_bos_gets_none() -> None:
    assert encode("a", make_tokenizer(adds_bos=False, has_bos=False, chat=None)).token_ids == ids("a")


def test_chat_messages_keep_their_order_and_get_the_system_prompt_once() -> None:
    messages = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    )
    assert encode(messages, kind="chat", system_prompt="Q").text == (
        "<s>[system] Q [user] a [assistant] b [user] c [assistant]"
    )
    own = ({"role": "system", "content": "A"}, *messages[:1])
    assert encode(own, kind="chat", system_prompt="Q").text == "<s>[system] A [user] a [assistant]"


def test_chat_prompt_with_the_plain_kind_is_refused() -> None:
    with pytest.raises(DataError, match=r"row e/1 is a chat, but template\.kind is plain"):
        encode(({"role": "user", "content": "a"},))


def test_chat_kind_without_a_template_is_refused() -> None:
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        encode("a", make_tokenizer(chat=None), kind="chat")


def test_bos_demanded_of_a_tokenizer_without_one_is_refused() -> None:
    with pytest.raises(DataError, match="the tokenizer has no BOS token"):
        encode("a", make_tokenizer(adds_bos=False, has_bos=False), bos="always")


def test_k9_template_hash_changes_with_everything_that_changes_the_text() -> None:
    tokenizer = make_tokenizer()
    specs = [
        {},
        {"prompt_format": "Q {prompt}"},
        {"bos": "never"},
        {"kind": "chat"},
        {"kind": "chat", "system_prompt": "Q"},
        {"kind": "chat", "chat_template": CHAT + " "},
        {"kind": "chat", "template_options": {"enable_thinking": False}},
    ]
    hashes = [PromptEncoder(TemplateSpec.model_validate(spec), tokenizer).template_hash for spec in specs]
    assert len(set(hashes)) == len(specs)
    other_template = make_tokenizer(chat=CHAT + "!")
    chat = TemplateSpec(kind="chat")
    assert PromptEncoder(chat, other_template).template_hash != PromptEncoder(chat, tokenizer).template_hash
    assert PromptEncoder(chat, make_tokenizer()).template_hash == PromptEncoder(chat, tokenizer).template_hash


def test_tokenizer_hash_changes_with_what_makes_ids() -> None:
    assert tokenizer_hash(make_tokenizer()) == tokenizer_hash(make_tokenizer())
    assert tokenizer_hash(make_tokenizer(adds_bos=False)) != tokenizer_hash(make_tokenizer())


def test_encode_all_keeps_the_order() -> None:
    encoder = PromptEncoder(TemplateSpec(), make_tokenizer())
    assert [prompt.text for prompt in encoder.encode_all([row("a"), row("b")])] == ["a", "b"]


def test_template_spec_reports_all_its_faults() -> None:
    with pytest.raises(ValueError, match=r"must contain \{prompt\} exactly once; template\.kind plain takes neither"):
        TemplateSpec(prompt_format="x", system_prompt="s")


def test_text_that_the_tokenizer_does_not_know_is_counted() -> None:
    assert (encode("a z b y").num_unknown, encode("a b").num_unknown) == (2, 0)


def test_unknown_token_that_is_also_the_end_is_not_counted() -> None:
    """GPT-2's tokenizer has one token for all of them, which a template may render."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<unk>"
    assert encode("a z", tokenizer).num_unknown == 0


def test_shortest_text_is_the_one_of_fewest_tokens_among_those_that_are_known() -> None:
    encoder = PromptEncoder(TemplateSpec(), make_tokenizer())
    assert encoder.shortest(["a b c", "b c"]) == 2
    assert encoder.shortest(["x", "a b c"]) == 3
    assert encoder.shortest(["x", "a x"]) is None
