"""A dataset row as every later stage sees it, and its identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Any
"""A value of JSON."""

PromptContent = str | tuple[Mapping[str, Json], ...]
"""Plain text, or chat messages `{role, content, ...}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt with what is needed to judge its completions."""

    prompt_id: str
    """`<environment>/<example>`: unique over all environments of the run."""

    environment: str
    """Name of the dataset or task; holds no '/'."""

    prompt: PromptContent
    """Text, or chat messages."""

    answer: str | None
    """Gold answer; None = the data has none."""

    metadata: Mapping[str, Json] = field(default_factory=dict)
    """Further columns, values of JSON."""

    def to_json(self) -> dict[str, Json]:
        """The row as a JSON object."""
        return {
            "prompt_id": self.prompt_id,
            "environment": self.environment,
            "prompt": self.prompt if isinstance(self.prompt, str) else [dict(message) for message in self.prompt],
            "answer": self.answer,
            "metadata": dict(self.metadata),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Json]) -> PromptRow:
        """The row that `to_json` described."""
        prompt = document["prompt"]
        return cls(
            prompt_id=document["prompt_id"],
            environment=document["environment"],
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            answer=document["answer"],
            metadata=document["metadata"],
        )


def canonical_json(value: Json) -> str:
    """JSON text that is equal for equal values: sorted keys, no spaces, ASCII only, no NaN.

    Raises:
        TypeError: The value is not one of JSON.
        ValueError: A number is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_digest(environment: str, prompt: PromptContent, answer: str | None) -> str:
    """Hash of what makes two rows the same problem: (environment, prompt, answer); 32 hex digits.

    Metadata is left out: it may hold notes that change nothing.
    """
    content = prompt if isinstance(prompt, str) else list(prompt)
    text = canonical_json([environment, content, answer])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
