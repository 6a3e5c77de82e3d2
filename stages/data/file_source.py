"""Sources that are files: JSONL and Parquet, by path or fsspec URL; and the reading of their columns."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from stages.data.rows import PromptContent, canonical_json
from stages.data.source import RawRow
from stages.data.spec import DataSpec
from stages.errors import DataError

JSON_LINES_SUFFIXES: Final = (".jsonl", ".ndjson")
PARQUET_SUFFIX: Final = ".parquet"
_SHOWN_EXAMPLES: Final = 3


def file_rows(spec: DataSpec, location: str) -> Iterator[RawRow]:
    """Rows of a JSONL or Parquet file.

    Args:
        spec: Column names and size.
        location: Path or fsspec URL.

    Raises:
        DataError: The file is missing or broken, or columns are missing or of a wrong type; all such rows are counted.
    """
    read = _json_lines if location.endswith(JSON_LINES_SUFFIXES) else _parquet_records
    try:
        yield from rows_of_records(read(location), spec, location)
    except FileNotFoundError as error:
        raise DataError(f"data.source {location!r} doesn't exist; give a path or URL readable here") from error
    # Besides errors of the system: a protocol that fsspec doesn't know, or whose package is missing.
    except (OSError, ImportError, ValueError) as error:
        raise DataError(f"data.source {location!r} can't be read: {error}; give a path or URL readable here") from error


def rows_of_records(records: Iterable[Mapping[str, Any]], spec: DataSpec, where: str) -> Iterator[RawRow]:
    """Rows of records by the column names of the spec.

    Raises:
        DataError: Rows whose columns are missing or of a wrong type, with their count and the first of them.
    """
    faults: list[str] = []
    num_faulty = 0
    for number, record in enumerate(islice(records, spec.size)):
        fault = _record_fault(record, spec)
        if fault is None:
            yield _row_of(record, spec)
            continue
        num_faulty += 1
        if len(faults) < _SHOWN_EXAMPLES:
            faults.append(f"row {number}: {fault}")
    if num_faulty:
        raise DataError(
            f"data.source {where!r} has {num_faulty} row(s) that can't be read: {'; '.join(faults)}. Set data.columns "
            "to the file's column names, or mend the rows",
            num_faulty=num_faulty,
        )


def _json_lines(location: str) -> Iterator[Mapping[str, Any]]:
    import fsspec

    with fsspec.open(location, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = _utf8(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, location, number)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"data.source {location!r} line {number} is no JSON: {error}") from error
            if not isinstance(record, dict):
                raise DataError(f"data.source {location!r} line {number} is a {type(record).__name__}, not an object")
            yield record


def _utf8(line: bytes, location: str, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.source {location!r} line {number} is no UTF-8 text (byte {error.start} of the line); save the file "
            "as UTF-8"
        ) from error


def _parquet_records(location: str) -> Iterator[Mapping[str, Any]]:
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    with fsspec.open(location, "rb") as file:
        try:
            for batch in pq.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        except pa.ArrowException as error:
            raise DataError(f"data.source {location!r} is no Parquet file: {error}") from error


def _record_fault(record: Mapping[str, Any], spec: DataSpec) -> str | None:
    columns = spec.columns
    needed = [columns.prompt, columns.answer, columns.prompt_id, columns.environment, *(columns.metadata or ())]
    missing = [name for name in needed if name is not None and name not in record]
    if missing:
        return f"no column {missing}; it has {sorted(record)}"
    if record[columns.prompt] in ("", []):
        return f"column {columns.prompt!r} is empty"
    if not _is_prompt(record[columns.prompt]):
        return f"column {columns.prompt!r} is neither text nor a list of {{role, content}} messages"
    if not _is_unicode(record):
        broken = [name for name, value in record.items() if not _is_unicode({name: value})]
        return f"column(s) {broken} hold half a character (a lone surrogate)"
    for name in (columns.prompt_id, columns.environment):
        if name is not None and (record[name] is None or isinstance(record[name], dict | list | float)):
            return f"column {name!r} holds {record[name]!r}, not a name"
    return None


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
            for message in value
        )
    )


def _is_unicode(record: Mapping[str, Any]) -> bool:
    """Whether a record can be written as UTF-8: JSON may name half of a character, which no tokenizer takes."""
    try:
        json.dumps(record, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def _row_of(record: Mapping[str, Any], spec: DataSpec) -> RawRow:
    columns = spec.columns
    prompt: PromptContent = record[columns.prompt]
    answer = None if columns.answer is None else record[columns.answer]
    used = {columns.prompt, columns.answer, columns.prompt_id, columns.environment}
    kept = [name for name in record if name not in used] if columns.metadata is None else columns.metadata
    return RawRow(
        example=None if columns.prompt_id is None else str(record[columns.prompt_id]),
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        answer=None if _is_missing(answer) else answer_text(answer),
        metadata={name: _json_value(record[name]) for name in kept},
        environment=None if columns.environment is None else str(record[columns.environment]),
    )


def _is_missing(answer: object) -> bool:
    # Table libraries write a missing number as NaN, which would become the text "nan" and pass for a gold answer.
    return answer is None or (isinstance(answer, float) and not math.isfinite(answer))


def answer_text(answer: object) -> str:
    """A gold answer as text: text as it is, numbers as Python writes them, the rest as JSON."""
    if isinstance(answer, str):
        return answer
    return canonical_json(answer) if isinstance(answer, dict | list | bool) else str(answer)


def _json_value(value: Any) -> Any:  # noqa: ANN401 - any column type in, any JSON type out
    # Dates, bytes and the like become text: metadata is for people and for verifiers, both of which read JSON.
    # A number that is none is no value.
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
