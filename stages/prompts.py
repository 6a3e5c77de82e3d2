"""The prompts of a run, encoded once per machine and then read row by row from a memory-mapped file.

Reading the source, templating and checking gold answers need a tokenizer library and verifiers, and cost seconds to
minutes; so a child process does it once (`stages.prompt_build`) and leaves Arrow files in the machine's cache. Their
key covers everything that decides their content.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from stages.data.dataset import Dataset
from stages.data.order import further_order, prompts_for_iteration
from stages.data.rows import PromptRow
from stages.errors import StageError
from stages.failures import raise_recorded_failure
from stages.spec.job import TrainingJob
from storage.documents import fingerprint
from storage.manifest import sha256_of_file

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Tokenizer

    from stages.timing import Deadline

FACTS_NAME: Final = "facts.json"
FAILURE_NAME: Final = "failure.json"
SPEC_NAME: Final = "spec.json"
TRAIN_NAME: Final = "train.arrow"
HELD_OUT_NAME: Final = "held_out.arrow"

#: Files of a model directory that decide how text becomes token ids.
_TOKENIZER_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json",
    "merges.txt", "tokenizer.model",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedRow:
    """One prompt: the row, its rendered text, its token ids."""

    row: PromptRow
    """The dataset row, with its gold answer."""
    text: str
    """Rendered prompt, for people."""
    token_ids: tuple[int, ...]
    """What an engine is given."""


@dataclass(frozen=True, slots=True)
class _RowKey:
    """Stands for a row where only its id is asked for."""

    prompt_id: str
    place: int


class EncodedRows(Sequence[EncodedRow]):
    """Rows of one part of the dataset, read from a memory-mapped Arrow file when they are asked for."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._table.num_rows)

    def prompt_ids(self) -> list[str]:
        """Return the ids of all rows, in order."""
        ids: list[str] = self._table.column("prompt_id").to_pylist()
        return ids

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - int or slice, as Sequence has it
        """Return one row, or a list of rows."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        values = self._table.slice(index % len(self), 1).to_pylist()[0]
        return EncodedRow(
            row=PromptRow.from_json(json.loads(values["row"])),
            text=values["text"],
            token_ids=tuple(values["token_ids"]),
        )

    def __iter__(self) -> Iterator[EncodedRow]:
        """Iterate over the rows in order."""
        return (self[place] for place in range(len(self)))


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Everything about the run's prompts that stages need."""

    folder: Path
    """Cache folder."""
    model_dir: Path
    """Model directory whose tokenizer made the ids."""
    facts: Mapping[str, Any]
    """Fingerprints and counts, see `stages.prompt_build`."""

    @property
    def dataset_fingerprint(self) -> str:
        """SHA-256 over all rows of both parts."""
        return str(self.facts["dataset_fingerprint"])

    @property
    def template_hash(self) -> str:
        """SHA-256 of the template as used."""
        return str(self.facts["template_hash"])

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of the tokenizer."""
        return str(self.facts["tokenizer_hash"])

    @cached_property
    def train(self) -> EncodedRows:
        """Rows to train on, in source order."""
        return EncodedRows(_open_table(self.folder / TRAIN_NAME))

    @cached_property
    def held_out(self) -> EncodedRows:
        """Rows to evaluate on, in source order."""
        return EncodedRows(_open_table(self.folder / HELD_OUT_NAME))

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that the model's files declare to end a completion, ascending."""
        return stop_token_ids(self.model_dir)

    def of_iteration(self, seed: int, iteration: int, num_prompts: int) -> list[EncodedRow]:
        """Return the prompts that an iteration trains on, in order."""
        return _ordered(self.train, seed, iteration, num_prompts)

    def further(self, seed: int, iteration: int, num_prompts: int, count: int) -> list[EncodedRow]:
        """Return prompts beyond an iteration's batch of `num_prompts`, at most `count`, in an order of their own."""
        used = [prompt.row.prompt_id for prompt in self.of_iteration(seed, iteration, num_prompts)]
        return [self.train[place] for place in further_order(self.train.prompt_ids(), used, seed, iteration, count)]

    def for_evaluation(self, seed: int, num_prompts: int) -> list[EncodedRow]:
        """Return the held-out prompts of every evaluation: a fixed sample of that size, or all there are."""
        return _ordered(self.held_out, seed, 0, min(num_prompts, len(self.held_out)))

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return texts of completions, without special tokens."""
        texts: list[str] = self._tokenizer.decode_batch([list(ids) for ids in token_ids], skip_special_tokens=True)
        return texts

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return _open_tokenizer(self.model_dir)


def _ordered(rows: EncodedRows, seed: int, iteration: int, num_prompts: int) -> list[EncodedRow]:
    # The order asks for ids only, so that the rows themselves need not be read.
    keys = tuple(_RowKey(prompt_id, place) for place, prompt_id in enumerate(rows.prompt_ids()))
    chosen = prompts_for_iteration(Dataset(cast("tuple[PromptRow, ...]", keys)), seed, iteration, num_prompts)
    return [rows[key.place] for key in cast("list[_RowKey]", chosen)]


def open_prompts(job: TrainingJob, model_dir: Path, cache_dir: Path, deadline: Deadline) -> Prompts:
    """Return the run's prompts; the first call on a machine builds them in a child process.

    Args:
        job: The job.
        model_dir: Directory with the tokenizer of policy version 0.
        cache_dir: Where the machine keeps them.
        deadline: When to give up.

    Raises:
        DataError: rows that can't be used; all faults with counts and first examples.
        RewardError: verifiers that can't be set up.
    """
    spec = build_spec(job, model_dir)
    folder = cache_dir / f"prompts-{fingerprint(spec)[:24]}"
    if not (folder / FACTS_NAME).exists():
        _build(spec, model_dir, folder, deadline, checked=checked_folder(job, cache_dir))
    facts = json.loads((folder / FACTS_NAME).read_text(encoding="utf-8"))
    return Prompts(folder=folder, model_dir=model_dir, facts=facts)


def prompt_cache(state_dir: Path, run: str) -> Path:
    """Return where a machine keeps the encoded prompts of a run."""
    return state_dir / "cache" / run


def check_prompts(job: TrainingJob, cache_dir: Path, deadline: Deadline) -> dict[str, Any]:
    """Encode and check the prompts with the tokenizer of the job's source, before there is a model; return the facts.

    They stay in the cache: `open_prompts` takes them over if the model turns out to have the same tokenizer.

    Raises:
        As `run_build`.
    """
    spec = {**build_spec(job, None), "source": job.source.model_dump(mode="json")}
    folder = checked_folder(job, cache_dir)
    shutil.rmtree(folder, ignore_errors=True)
    _build(spec, None, folder, deadline)
    facts: dict[str, Any] = json.loads((folder / FACTS_NAME).read_text(encoding="utf-8"))
    return facts


def checked_folder(job: TrainingJob, cache_dir: Path) -> Path:
    """Return where the preflight check leaves the prompts of a job."""
    spec = {**build_spec(job, None), "source": job.source.model_dump(mode="json")}
    return cache_dir / f"checked-{fingerprint(spec)[:24]}"


def build_spec(job: TrainingJob, model_dir: Path | None) -> dict[str, Any]:
    """Return everything that decides the encoded prompts, as a JSON document."""
    present = [] if model_dir is None else [model_dir / name for name in _TOKENIZER_FILES]
    return {
        "data": job.data.model_dump(mode="json"),
        "template": job.template.model_dump(mode="json"),
        "rewards": job.rewards.model_dump(mode="json"),
        "max_over_length_fraction": job.limits.max_over_length_fraction,
        "max_response_tokens": job.planner.lengths.response,
        "num_prompts": job.prompts_per_iteration,
        "files": [_file_state(path) for path in (job.data.source, job.data.held_out_source) if path is not None],
        "tokenizer": {path.name: sha256_of_file(path)[1] for path in present if path.is_file()},
    }


def stop_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Return every end-of-sequence id that generation config, model config and tokenizer declare, ascending."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(model_dir / name).get("eos_token_id")
        found.update(declared if isinstance(declared, list) else [] if declared is None else [declared])
    token = _read_json(model_dir / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str):
        token_id = _open_tokenizer(model_dir).token_to_id(content)
        found.update(() if token_id is None else (token_id,))
    return tuple(sorted(found))


def _file_state(source: str) -> list[int] | None:
    """Return size and time of change of a local dataset file, so that another content is another cache entry."""
    if not source.startswith("/"):
        return None
    try:
        found = Path(source).stat()
    except OSError:
        return None  # reading it says what is wrong
    return [found.st_size, found.st_mtime_ns]


def _build(
    spec: Mapping[str, Any], model_dir: Path | None, folder: Path, deadline: Deadline, *, checked: Path | None = None
) -> None:
    work = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        run_build(spec, model_dir, work, deadline, checked=checked)
        try:
            work.rename(folder)
        except OSError:
            if not (folder / FACTS_NAME).exists():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run_build(
    spec: Mapping[str, Any], model_dir: Path | None, folder: Path, deadline: Deadline, *, checked: Path | None = None
) -> None:
    """Encode and check the prompts in a child process.

    Args:
        spec: See `build_spec`; without a model directory it also has the job's `source`.
        model_dir: Directory with the tokenizer, or None.
        folder: Made here; holds the result.
        deadline: When to give up.
        checked: Prompts of the same spec that the preflight check left; taken over if the tokenizer is the same.

    Raises:
        DataError: rows that can't be used; all faults with counts and first examples.
        RewardError: verifiers that can't be set up.
        DeadlineError: it took too long.
    """
    folder.mkdir(parents=True)
    (folder / SPEC_NAME).write_text(json.dumps(spec), encoding="utf-8")
    command = [sys.executable, "-m", "stages.prompt_build", "--folder", str(folder)]
    command += [] if model_dir is None else ["--model-dir", str(model_dir)]
    command += [] if checked is None else ["--checked", str(checked)]
    what = "the encoded prompts"
    try:
        done = subprocess.run(command, stdout=sys.stderr, timeout=deadline.remaining_s(what), check=False)
    except subprocess.TimeoutExpired:
        deadline.remaining_s(what)
        raise
    if done.returncode:
        raise_recorded_failure(folder / FAILURE_NAME, f"encoding the prompts (exit code {done.returncode})")


def _open_table(path: Path) -> pa.Table:
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _open_tokenizer(model_dir: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise StageError(f"{model_dir} has no tokenizer.json; save the model with a fast tokenizer.")
    return Tokenizer.from_file(str(path))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
