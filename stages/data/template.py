"""From a row to the token ids that the policy sees: encoded once here, then only passed on as ids.

Needs a Hugging Face tokenizer object from the caller; imports neither transformers nor torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stages.data.rows import PromptRow, canonical_json
from stages.data.spec import TemplateSpec
from stages.errors import DataError


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    bos_token_id: int | None
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:  # noqa: ANN401 - theirs
        """Text of a conversation."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Token to id."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the engine gets it."""

    prompt_id: str
    """Row that it was made from."""

    text: str
    """The rendered text, for people; the ids are what counts."""

    token_ids: tuple[int, ...]
    """Token ids, with exactly one BOS in front if one is wanted, else none."""

    num_unknown: int = 0
    """Tokens that stand for text which the tokenizer doesn't know: the policy can't read that text."""


class PromptEncoder:
    """Renders and encodes rows with one template and one tokenizer."""

    def __init__(self, spec: TemplateSpec, tokenizer: Tokenizer) -> None:
        """Check that template and tokenizer fit.

        Raises:
            DataError: No chat template, or a BOS is demanded of a tokenizer without one.
        """
        self._spec = spec
        self._tokenizer = tokenizer
        # A chat template says itself whether a BOS belongs there; only plain text takes the tokenizer's habit.
        self._unknown = _unknown_id(tokenizer)
        self._adds_bos = spec.kind == "plain" and _prepends_bos(tokenizer)
        if spec.kind == "chat" and self._chat_template is None:
            raise DataError(
                "template.kind is chat, but the tokenizer has no chat template; give template.chat_template, or use "
                "kind: plain"
            )
        if spec.bos == "always" and tokenizer.bos_token_id is None:
            raise DataError("template.bos is always, but the tokenizer has no BOS token; set it to never or auto")

    @property
    def template_hash(self) -> str:
        """SHA-256 of the template as used: kind, text, system prompt, options and BOS rule; 64 hex digits."""
        used = self._spec.model_dump() | {"chat_template": self._chat_template if self._spec.kind == "chat" else None}
        return hashlib.sha256(canonical_json(used).encode()).hexdigest()

    def encode(self, row: PromptRow) -> EncodedPrompt:
        """Text and ids of one row.

        Raises:
            DataError: A chat prompt with the plain kind.
        """
        text = self._render(row)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return EncodedPrompt(
            prompt_id=row.prompt_id,
            text=text,
            token_ids=tuple(self._with_one_bos(ids)),
            num_unknown=0 if self._unknown is None else ids.count(self._unknown),
        )

    def encode_all(self, rows: Sequence[PromptRow]) -> list[EncodedPrompt]:
        """Text and ids of all rows, in their order."""
        return [self.encode(row) for row in rows]

    def shortest(self, texts: Sequence[str]) -> int | None:
        """Tokens of the shortest of some texts; None if the tokenizer knows none of them wholly."""
        encoded = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        known = [len(ids) for ids in encoded if self._unknown is None or self._unknown not in ids]
        return min(known, default=None)

    @property
    def _chat_template(self) -> str | None:
        return self._spec.chat_template or self._tokenizer.chat_template

    def _render(self, row: PromptRow) -> str:
        if self._spec.kind == "plain":
            if not isinstance(row.prompt, str):
                raise DataError(f"row {row.prompt_id} is a chat, but template.kind is plain; use kind: chat")
            return self._spec.prompt_format.replace("{prompt}", row.prompt)
        rendered: str = self._tokenizer.apply_chat_template(
            _conversation(row, self._spec.system_prompt),
            chat_template=self._chat_template,
            add_generation_prompt=True,
            tokenize=False,
            **self._spec.template_options,
        )
        return rendered

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self._tokenizer.bos_token_id
        if bos is None:
            return ids
        num_leading = next((place for place, token in enumerate(ids) if token != bos), len(ids))
        wanted = self._spec.bos == "always" or (self._spec.bos == "auto" and (num_leading > 0 or self._adds_bos))
        return [bos] * wanted + ids[num_leading:]


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 of what makes ids: the fast tokenizer's own serialisation, else the vocabulary; 64 hex digits."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = canonical_json(tokenizer.get_vocab()) if backend is None else backend.to_str()
    return hashlib.sha256(f"{text}\n{tokenizer.bos_token_id}".encode()).hexdigest()


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that stands for unknown text; None where the tokenizer has none, or uses it for something else."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    return None if unknown in others else unknown


def _prepends_bos(tokenizer: Tokenizer) -> bool:
    if tokenizer.bos_token_id is None:
        return False
    with_special = tokenizer.encode("a", add_special_tokens=True)
    return with_special[:1] == [tokenizer.bos_token_id]


def _conversation(row: PromptRow, system_prompt: str | None) -> list[dict[str, Any]]:
    if isinstance(row.prompt, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": row.prompt}]
    else:
        messages = [dict(message) for message in row.prompt]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages
