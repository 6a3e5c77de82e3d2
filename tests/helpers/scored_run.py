"""A run with a few scored completions, for tests of scoring them again."""

from __future__ import annotations

from pathlib import Path

from stages.data.dataset import load_dataset
from stages.runs import ResolvedRun
from storage.rollout_schema import row_id
from storage.rollouts import write_family, write_rollouts
from storage.store import open_store
from tests.helpers.stage_contexts import make_run
from tests.helpers.storage_builders import rollout_row

EXACT = {"terms": [{"name": "exact_answer"}]}
THREE_DIGITS = {"terms": [{"name": "exact_answer", "options": {"pattern": r"^(\d\d\d)$"}}]}


def write_scored_run(base: Path) -> ResolvedRun:
    """Write run `r` with two iterations of one prompt: a right answer, one with blanks, a wrong one, a cut one."""
    run = make_run(base)
    store = open_store(run.home_root)
    prompt = load_dataset(run.job.data).train.rows[0]
    answers = {prompt.answer: "stop", f" {prompt.answer} ": "stop", "7": "stop", "12": "length"}
    for iteration in range(2):
        rows = [
            rollout_row(
                0, sample, iteration, prompt_id=prompt.prompt_id, completion_text=text, gold_answer=prompt.answer,
                finish_reason=reason,
            )
            for sample, (text, reason) in enumerate(answers.items())
        ]  # fmt: skip
        write_rollouts(store, "r", iteration, 0, 1, rows, input_fingerprint="f", created_by="test")
        rewards = [
            {
                "row_id": row_id("r", iteration, prompt.prompt_id, sample),
                "reward": None if reason == "length" else float(sample == 0),
                "reward_status": "truncated" if reason == "length" else "ok",
                "reward_parts": {},
                "verifier": "before/1",
            }
            for sample, reason in enumerate(answers.values())
        ]
        write_family(store, "r", iteration, "reward", 0, 1, rewards, input_fingerprint="f", created_by="test")
    return run


def content_of(url: str) -> dict[str, str]:
    """Return the files below a local root, as hexadecimal text."""
    root = Path(url.removeprefix("file://"))
    return {str(path.relative_to(root)): path.read_bytes().hex() for path in root.rglob("*") if path.is_file()}
