"""Sections `data` and `template` of a job: where prompts come from and how they become token ids.

Refuses unknown fields and contradictions; knows nothing of the file system or of a tokenizer.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ColumnsSpec(BaseModel):
    """Names of the source columns that hold a row's parts (file and HF sources only)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    prompt: str = Field(default="prompt", min_length=1)
    """Column of the prompt: text, or a list of `{role, content}` chat messages."""

    answer: str | None = Field(default="answer")
    """Column of the gold answer; null when no reward needs one."""

    prompt_id: str | None = Field(default=None)
    """Column of an author-given example id (kept unique per environment); null = hash of (environment, content)."""

    environment: str | None = Field(default=None)
    """Column that names the environment of each row; null = `DataSpec.environment` for all rows."""

    metadata: tuple[str, ...] | None = Field(default=None)
    """Columns kept as metadata; null = all the others, empty = none."""


class DataSpec(BaseModel):
    """The dataset of a run.

    Sources: a path or fsspec URL ending in `.jsonl`, `.ndjson` or `.parquet`; `hf:<dataset id>` (optional package
    `datasets`); `reasoning-gym:<task>` (optional package `reasoning-gym`); `arithmetic:<addition|multiplication>`
    (built in: two 2-digit numbers, fixed-width result, 10,000 problems).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    source: str = Field(min_length=1)
    """Where rows come from; see the class."""

    environment: str | None = Field(default=None, min_length=1)
    """Name under which rows are identified; part of every prompt_id. Null = the source string."""

    columns: ColumnsSpec = Field(default_factory=ColumnsSpec)
    """Column names of file and HF sources."""

    size: int | None = Field(default=None, ge=1)
    """Number of rows to generate, or to keep from the start of a file; null = all of a finite source."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of procedural rows, of the split and of the epoch permutations."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the source: reasoning-gym's task configuration, or `{name, split, revision}` of an HF dataset."""

    held_out_fraction: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Fraction of rows never trained on, in [0, 1); the rows whose hash of (seed, prompt_id) is least, so that their
    order in the source doesn't matter."""

    held_out_source: str | None = Field(default=None)
    """A separate source for the held-out rows, read with the same columns; then `held_out_fraction` must be 0."""

    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest allowed prompt after templating, in tokens."""

    too_long: Literal["refuse", "drop"] = "refuse"
    """What happens to prompts over `max_prompt_tokens`: refuse the dataset, or drop and count them."""

    duplicates: Literal["refuse", "drop", "keep"] = "refuse"
    """What happens to rows with equal (environment, content): `refuse` the dataset; `drop` all but the first and count,
    which changes the weights of a procedural mixture whose small tasks repeat themselves (the facts say by how much);
    or `keep` them, each under an id of its own, copies always on the same side of the split."""

    unparsable_gold: Literal["refuse", "drop"] = "refuse"
    """What happens to rows whose gold answer the verifier can't parse, or that no completion can give (with
    `exact_answer`: longer than `lengths.response`, or of text that the tokenizer doesn't know): refuse the dataset, or
    drop and count them."""

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> Self:
        if self.held_out_source is not None and self.held_out_fraction != 0.0:
            raise ValueError(
                f"data.held_out_fraction is {self.held_out_fraction} although data.held_out_source is given: "
                "rows are held out either by fraction or by source; set held_out_fraction to 0"
            )
        return self


class TemplateSpec(BaseModel):
    """How a row becomes the text, then the token ids, that the policy sees.

    Exactly one BOS precedes the ids when `bos` asks for one, whether or not the template or the tokenizer adds it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["plain", "chat"] = "plain"
    """`plain`: `prompt_format`; `chat`: the tokenizer's chat template (or `chat_template`)."""

    prompt_format: str = Field(default="{prompt}")
    """Format of the plain kind; the literal `{prompt}` is replaced once, nothing else is interpreted."""

    chat_template: str | None = Field(default=None)
    """Jinja chat template that replaces the tokenizer's own; null = the tokenizer's."""

    system_prompt: str | None = Field(default=None)
    """System message prepended to chat prompts that have none of their own."""

    template_options: dict[str, Any] = Field(default_factory=dict)
    """Extra variables handed to the chat template, e.g. `{enable_thinking: false}`."""

    bos: Literal["auto", "always", "never"] = "auto"
    """`auto`: one BOS if the tokenizer prepends one to plain text or the template renders one; `always`; `never`."""

    @model_validator(mode="after")
    def _kind_and_fields_agree(self) -> Self:
        faults: list[str] = []
        if self.prompt_format.count("{prompt}") != 1:
            faults.append(f"template.prompt_format {self.prompt_format!r} must contain {{prompt}} exactly once")
        if self.kind == "plain" and (self.chat_template is not None or self.system_prompt is not None):
            faults.append("template.kind plain takes neither chat_template nor system_prompt; use kind: chat")
        if self.kind == "chat" and self.prompt_format != "{prompt}":
            faults.append("template.kind chat takes no prompt_format; use kind: plain or chat_template")
        if faults:
            raise ValueError("; ".join(faults))
        return self
