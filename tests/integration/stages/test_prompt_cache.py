"""The preflight check and the first stage encode the dataset once between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.models.character_tokenizer import make_character_tokenizer
from stages.prompts import FACTS_NAME, Prompts, check_prompts, checked_folder, open_prompts
from stages.spec.job import TrainingJob
from stages.timing import Clock, Deadline
from tests.helpers.stage_contexts import make_run

pytestmark = [pytest.mark.engines]

DEADLINE = Deadline(clock=Clock(), ends_at=Clock().monotonic() + 24 * 3600)


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    """A job on a file of 200 problems."""
    source = tmp_path / "rows.jsonl"
    _write_rows(source, 200)
    job = make_run(tmp_path).job
    data = job.data.model_copy(update={"source": str(source), "size": None})
    fields = {name: getattr(job, name) for name in type(job).model_fields}
    return TrainingJob(**{**fields, "data": data})


def _write_rows(path: Path, number: int) -> None:
    pairs = [divmod(n, 10) for n in range(number)]
    rows = [{"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _model_dir(folder: Path, alphabet: str) -> Path:
    make_character_tokenizer(alphabet).save_pretrained(folder)
    return folder


def _mark(job: TrainingJob, cache: Path) -> None:
    """Change a fact that the check left, so that it can be told from one that was found anew."""
    path = checked_folder(job, cache) / FACTS_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "mark": True}))


def _is_taken_over(prompts: Prompts) -> bool:
    return "mark" in prompts.facts


def test_prompts_of_the_check_are_taken_over_and_equal_those_made_anew(job: TrainingJob, tmp_path: Path) -> None:
    model_dir = _model_dir(tmp_path / "model", job.source.alphabet)
    facts = check_prompts(job, tmp_path / "cache", DEADLINE)
    _mark(job, tmp_path / "cache")

    taken = open_prompts(job, model_dir, tmp_path / "cache", DEADLINE)
    again = open_prompts(job, model_dir, tmp_path / "cache", DEADLINE)
    anew = open_prompts(job, model_dir, tmp_path / "other", DEADLINE)

    assert [_is_taken_over(prompts) for prompts in (taken, again, anew)] == [True, True, False]
    assert list(taken.train) == list(anew.train)
    assert list(taken.held_out) == list(anew.held_out)
    assert anew.facts == facts
    assert not checked_folder(job, tmp_path / "cache").exists()  # the disk holds them once


def test_prompts_of_another_tokenizer_are_made_anew(job: TrainingJob, tmp_path: Path) -> None:
    check_prompts(job, tmp_path / "cache", DEADLINE)
    _mark(job, tmp_path / "cache")
    model_dir = _model_dir(tmp_path / "model", job.source.alphabet[::-1])
    assert not _is_taken_over(open_prompts(job, model_dir, tmp_path / "cache", DEADLINE))


def test_file_that_changed_after_the_check_is_read_again(job: TrainingJob, tmp_path: Path) -> None:
    model_dir = _model_dir(tmp_path / "model", job.source.alphabet)
    check_prompts(job, tmp_path / "cache", DEADLINE)
    _mark(job, tmp_path / "cache")
    _write_rows(Path(job.data.source), 150)
    prompts = open_prompts(job, model_dir, tmp_path / "cache", DEADLINE)
    assert (_is_taken_over(prompts), len(prompts.train) + len(prompts.held_out)) == (False, 150)
