"""A run's dataset: rows with identity, a fingerprint, and the split into training and held-out prompts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Final

from stages.data.arithmetic_source import arithmetic_rows
from stages.data.file_source import JSON_LINES_SUFFIXES, PARQUET_SUFFIX, file_rows
from stages.data.hf_source import hf_rows
from stages.data.mixture import Mixture
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

    mixture: Mixture = field(default_factory=Mixture)
    """Rows of each part, before anything was left out."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of both parts, 64 hex digits; recorded with the run and compared on resume."""
        return hashlib.sha256(f"{self.train.fingerprint} {self.held_out.fingerprint}".encode()).hexdigest()


def load_dataset(spec: DataSpec) -> SplitDataset:
    """Read the source, give every row its identity and split.

    Raises:
        DataError: The source can't be read, is empty, or holds duplicates that the spec refuses.
    """
    read = [_read(spec, spec.source)]
    if spec.held_out_source is None:
        train, held_out = split_rows(read[0].rows, spec.held_out_fraction, spec.seed, copy_of=read[0].copy_of)
    else:
        read.append(_read(spec, spec.held_out_source))
        train, held_out = read[0].rows, read[1].rows
        _refuse_leak(train, held_out)
    part_of = {prompt_id: part for source in read for prompt_id, part in source.part_of.items()}
    rows_read = sum((source.rows_read for source in read), Counter[str]())
    return SplitDataset(
        train=Dataset(train),
        held_out=Dataset(held_out),
        num_dropped_duplicates=rows_read.total() - len(train) - len(held_out),
        mixture=Mixture(part_of=part_of, rows_read=rows_read),
    )


def split_rows(
    rows: Sequence[PromptRow], held_out_fraction: float, seed: int, *, copy_of: Mapping[str, str] | None = None
) -> tuple[tuple[PromptRow, ...], tuple[PromptRow, ...]]:
    """(train, held out), each in source order: the share of rows whose hash of (seed, prompt_id) is least is held out.

    Membership doesn't depend on the order of the rows. Copies of a row go where it goes; so as many rows are held out
    as the fraction says, or a few more.

    Args:
        rows: All rows.
        held_out_fraction: Share to hold out, in [0, 1).
        seed: Seed of the choice.
        copy_of: Prompt id of the first equal row, for rows that are copies.

    Raises:
        DataError: Nothing would be left to train on.
    """
    copy_of = copy_of or {}
    originals = Counter(copy_of.get(row.prompt_id, row.prompt_id) for row in rows)
    ranked = sorted(originals, key=lambda prompt_id: hashlib.sha256(f"{seed} {prompt_id}".encode()).digest())
    wanted, chosen = round(len(rows) * held_out_fraction), set[str]()
    num_held_out = 0
    for original in ranked:
        if num_held_out >= wanted:
            break
        chosen.add(original)
        num_held_out += originals[original]
    if rows and num_held_out == len(rows):
        raise DataError(
            f"data.held_out_fraction {held_out_fraction} holds out all {len(rows)} rows; give more rows or a smaller "
            "fraction"
        )
    is_held_out = [copy_of.get(row.prompt_id, row.prompt_id) in chosen for row in rows]
    train = tuple(row for row, held in zip(rows, is_held_out, strict=True) if not held)
    return train, tuple(row for row, held in zip(rows, is_held_out, strict=True) if held)


def default_environment(source: str) -> str:
    """Environment name of a source without one: the file's stem, or the source with '/' replaced."""
    if source.endswith((*JSON_LINES_SUFFIXES, PARQUET_SUFFIX)):
        return PurePosixPath(source).stem
    return source.replace("/", "--")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """The rows of one source with their identities."""

    rows: tuple[PromptRow, ...]
    copy_of: Mapping[str, str]
    part_of: Mapping[str, str]
    rows_read: Counter[str]


def _read(spec: DataSpec, source: str) -> _Read:
    environment = spec.environment or default_environment(source)
    raw = list(_raw_rows(spec, source))
    rows = [_identified(row, environment) for row in raw]
    if not rows:
        raise DataError(f"data.source {source!r} is empty; a run needs at least one row")
    bad = sorted({row.environment for row in rows if "/" in row.environment})
    if bad:
        raise DataError(f"data.environment {bad} holds '/', which separates environment and example in a prompt id")
    parts = [entry.part or row.environment for entry, row in zip(raw, rows, strict=True)]
    kept, copy_of = _without_duplicates(rows, source, spec.duplicates)
    part_of = {row.prompt_id: part for row, part in zip(kept, parts, strict=True) if row is not None}
    unique = tuple(row for row in kept if row is not None)
    return _Read(rows=unique, copy_of=copy_of, part_of=part_of, rows_read=Counter(parts))


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


def _without_duplicates(
    rows: Sequence[PromptRow], source: str, duplicates: str
) -> tuple[list[PromptRow | None], dict[str, str]]:
    """Every row, None for one that is left out; and for each copy that is kept the id of the first equal row.

    Equal problems under two ids count too: one could be held out and the other not.
    """
    first_of: dict[str, PromptRow] = {}
    num_equal: Counter[str] = Counter()
    kept: list[PromptRow | None] = []
    copy_of: dict[str, str] = {}
    repeated: list[str] = []
    for row in rows:
        content = content_digest(row.environment, row.prompt, row.answer)
        first = first_of.setdefault(content, row)
        num_equal[content] += 1
        if first is row:
            kept.append(row)
            continue
        repeated.append(row.prompt_id)
        is_same_id = row.prompt_id == first.prompt_id
        copy = replace(row, prompt_id=f"{row.prompt_id}.{num_equal[content]}") if is_same_id else row
        kept.append(copy if duplicates == "keep" else None)
        if duplicates == "keep":
            copy_of[copy.prompt_id] = first.prompt_id
    counts = Counter(row.prompt_id for row in kept if row is not None)
    clashes = [prompt_id for prompt_id, count in counts.items() if count > 1]
    if clashes:
        raise DataError(
            f"data.source {source!r} uses {len(clashes)} id(s) for different problems, first: "
            f"{', '.join(clashes[:_SHOWN_EXAMPLES])}. Ids must be unique inside an environment"
        )
    if repeated and duplicates == "refuse":
        raise DataError(
            f"data.source {source!r} has {len(repeated)} duplicate row(s), first: "
            f"{', '.join(repeated[:_SHOWN_EXAMPLES])}. Remove them, or set data.duplicates to drop (all but the first; "
            "this changes the mixture) or keep",
            num_duplicates=len(repeated),
        )
    return kept, copy_of


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
