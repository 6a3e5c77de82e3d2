"""A run's dataset: rows with identity, a fingerprint, and the split into training and held-out prompts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Final

from stages.data.arithmetic_source import arithmetic_rows
from stages.data.file_source import JSON_LINES_SUFFIXES, PARQUET_SUFFIX, file_rows
from stages.data.hf_source import hf_rows
from stages.data.reasoning_gym_source import reasoning_gym_rows
from stages.data.rows import PromptRow, canonical_json, content_digest
from stages.data.source import RawRow
from stages.data.spec import DataSpec
from stages.errors import DataError

SOURCES: Final[Mapping[str, Callable[[DataSpec, str], Iterator[RawRow]]]] = {
    "arithmetic": arithmetic_rows,
    "hf": hf_rows,
    "reasoning-gym": reasoning_gym_rows,
}
"""Source by the scheme before the first ':' of `DataSpec.source`; all else is a file."""

_SHOWN_EXAMPLES: Final = 3


@dataclass(frozen=True)
class Dataset:
    """Rows in source order; each prompt_id occurs once."""

    rows: tuple[PromptRow, ...]
    """The rows."""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all rows in order, 64 hex digits. A resumed run must find the same (NeMo-RL#2519)."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(canonical_json(row.to_json()).encode() + b"\n")
        return digest.hexdigest()

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDataset:
    """Training and held-out rows of a run, and what was left out."""

    train: Dataset
    """Rows to train on."""

    held_out: Dataset
    """Rows to evaluate on, never trained on; may be empty."""

    num_dropped_duplicates: int
    """Rows left out since an equal one came before."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of both parts, 64 hex digits; recorded with the run and compared on resume."""
        return hashlib.sha256(f"{self.train.fingerprint} {self.held_out.fingerprint}".encode()).hexdigest()


def load_dataset(spec: DataSpec) -> SplitDataset:
    """Read the source, give every row its identity and split.

    Raises:
        DataError: The source can't be read, is empty, or holds duplicates that the spec refuses.
    """
    rows, num_dropped = _identified_rows(spec, spec.source)
    if spec.held_out_source is None:
        train, held_out = split_rows(rows, spec.held_out_fraction, spec.seed)
    else:
        train = rows
        held_out, held_out_dropped = _identified_rows(spec, spec.held_out_source)
        num_dropped += held_out_dropped
        _refuse_leak(train, held_out)
    return SplitDataset(train=Dataset(train), held_out=Dataset(held_out), num_dropped_duplicates=num_dropped)


def split_rows(
    rows: Sequence[PromptRow], held_out_fraction: float, seed: int
) -> tuple[tuple[PromptRow, ...], tuple[PromptRow, ...]]:
    """(train, held out), each in source order: the share of rows whose hash of (seed, prompt_id) is least is held out.

    Membership doesn't depend on the order of the rows.

    Raises:
        DataError: Nothing would be left to train on.
    """
    num_held_out = round(len(rows) * held_out_fraction)
    if rows and num_held_out == len(rows):
        raise DataError(
            f"data.held_out_fraction {held_out_fraction} holds out all {len(rows)} rows; give more rows or a smaller "
            "fraction"
        )
    ranked = sorted(rows, key=lambda row: hashlib.sha256(f"{seed} {row.prompt_id}".encode()).digest())
    chosen = {row.prompt_id for row in ranked[:num_held_out]}
    train = tuple(row for row in rows if row.prompt_id not in chosen)
    return train, tuple(row for row in rows if row.prompt_id in chosen)


def default_environment(source: str) -> str:
    """Environment name of a source without one: the file's stem, or the source with '/' replaced."""
    if source.endswith((*JSON_LINES_SUFFIXES, PARQUET_SUFFIX)):
        return PurePosixPath(source).stem
    return source.replace("/", "--")


def _identified_rows(spec: DataSpec, source: str) -> tuple[tuple[PromptRow, ...], int]:
    environment = spec.environment or default_environment(source)
    rows = [_identified(raw, environment) for raw in _raw_rows(spec, source)]
    if not rows:
        raise DataError(f"data.source {source!r} is empty; a run needs at least one row")
    bad = sorted({row.environment for row in rows if "/" in row.environment})
    if bad:
        raise DataError(f"data.environment {bad} holds '/', which separates environment and example in a prompt id")
    return _without_duplicates(rows, source, drop=spec.duplicates == "drop")


def _raw_rows(spec: DataSpec, source: str) -> Iterator[RawRow]:
    scheme, _, rest = source.partition(":")
    if scheme in SOURCES:
        return SOURCES[scheme](spec, rest)
    if source.endswith((*JSON_LINES_SUFFIXES, PARQUET_SUFFIX)):
        return file_rows(spec, source)
    known = ", ".join([*(f"{name}:..." for name in SOURCES), *JSON_LINES_SUFFIXES, PARQUET_SUFFIX])
    raise DataError(f"data.source {source!r} is no known kind of source; known: {known}")


def _identified(raw: RawRow, environment: str) -> PromptRow:
    name = raw.environment or environment
    example = raw.example or content_digest(name, raw.prompt, raw.answer)
    return PromptRow(
        prompt_id=f"{name}/{example}",
        environment=name,
        prompt=raw.prompt,
        answer=raw.answer,
        metadata=raw.metadata,
    )


def _without_duplicates(rows: Sequence[PromptRow], source: str, *, drop: bool) -> tuple[tuple[PromptRow, ...], int]:
    """First row of each content. Equal problems under two ids count too: one could be held out and the other not."""
    by_content: dict[str, PromptRow] = {}
    repeated: list[str] = []
    for row in rows:
        content = content_digest(row.environment, row.prompt, row.answer)
        if by_content.setdefault(content, row) is not row:
            repeated.append(row.prompt_id)
    unique = tuple(by_content.values())
    clashes = [prompt_id for prompt_id, n in Counter(row.prompt_id for row in unique).items() if n > 1]
    if clashes:
        raise DataError(
            f"data.source {source!r} uses {len(clashes)} id(s) for different problems, first: "
            f"{', '.join(clashes[:_SHOWN_EXAMPLES])}. Ids must be unique inside an environment"
        )
    if repeated and not drop:
        raise DataError(
            f"data.source {source!r} has {len(repeated)} duplicate row(s), first: "
            f"{', '.join(repeated[:_SHOWN_EXAMPLES])}. Remove them, or set data.duplicates to drop",
            num_duplicates=len(repeated),
        )
    return unique, len(repeated)


def _refuse_leak(train: Sequence[PromptRow], held_out: Sequence[PromptRow]) -> None:
    trained = {_prompt_text(row) for row in train}
    leaked = [row.prompt_id for row in held_out if _prompt_text(row) in trained]
    if leaked:
        raise DataError(
            f"data.held_out_source shares {len(leaked)} prompt(s) with data.source: "
            f"{', '.join(leaked[:_SHOWN_EXAMPLES])}. Held-out prompts must not be trained on; remove them from one"
        )


def _prompt_text(row: PromptRow) -> str:
    return row.prompt if isinstance(row.prompt, str) else canonical_json(list(row.prompt))
