"""Scoring committed completions again: old and new rewards side by side, the run untouched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stages.data.dataset import load_dataset
from stages.errors import ContractError, SpecFaultsError
from stages.rescore import RescoreRequest, rescore
from storage.rollout_schema import row_id
from storage.rollouts import write_family, write_rollouts
from tests.helpers.stage_contexts import make_context, make_run
from tests.helpers.storage_builders import rollout_row

EXACT = {"terms": [{"name": "exact_answer"}]}
THREE_DIGITS = {"terms": [{"name": "exact_answer", "options": {"pattern": r"^(\d\d\d)$"}}]}


@pytest.fixture(scope="module")
def scored_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """Root of run `r` with two iterations of one prompt: a right answer, one with blanks, a wrong one, a cut one."""
    base = tmp_path_factory.mktemp("run")
    run = make_run(base)
    store = make_context(run, base, "plan", 0).home
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
    return store.url, _content(store.url)


def _content(url: str) -> dict[str, str]:
    root = Path(url.removeprefix("file://"))
    return {str(path): path.read_bytes().hex() for path in root.rglob("*") if path.is_file()}


def request(root: str, target: Path, **changes: Any) -> RescoreRequest:
    return RescoreRequest.model_validate({"root": root, "run": "r", "rewards": EXACT, "target": str(target)} | changes)


def test_new_rewards_stand_beside_the_old_ones_and_the_run_is_untouched(
    scored_run: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    root, before = scored_run

    done = list(rescore(request(root, tmp_path)))

    # Blanks around an answer don't count for `exact_answer`, whatever scored before thought of them.
    assert [{name: one[name] for name in ("iteration", "rows", "scored", "changed")} for one in done] == [
        {"iteration": k, "rows": 4, "scored": 3, "changed": 1} for k in range(2)
    ]
    assert [(one["before"], one["after"]) for one in done] == [(pytest.approx(1 / 3), pytest.approx(2 / 3))] * 2
    rows = pq.read_table(tmp_path / done[1]["file"]).to_pylist()
    assert [(row["reward_before"], row["reward"], row["reward_status"]) for row in rows] == [
        (1.0, 1.0, "ok"), (0.0, 1.0, "ok"), (0.0, 0.0, "ok"), (None, None, "truncated"),
    ]  # fmt: skip
    assert _content(root) == before


def test_range_of_iterations_and_another_verdict(scored_run: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    (done,) = rescore(request(scored_run[0], tmp_path, rewards=THREE_DIGITS, first=1, last=1))

    statuses = pq.read_table(tmp_path / done["file"], columns=["reward_status"]).column(0).to_pylist()
    assert done["iteration"] == 1
    assert statuses[2:] == ["unparsable", "truncated"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"first": 5}, ContractError, r"iteration\(s\) 5; there are: 0 to 1"),
        ({"last": 3}, ContractError, r"iteration\(s\) 2, 3; there are: 0 to 1"),
        ({"split": "eval"}, ContractError, r"\(eval\) of iteration\(s\) 0; there are: none"),
        ({"rewards": {"terms": [{"name": "nonsense"}]}}, SpecFaultsError, "nonsense"),
        ({"rewards": {"terms": [{"name": "exact_answer", "weight": 0}]}}, SpecFaultsError, "weight is 0"),
        ({"rewards": EXACT | {"reward_model": {"weight": 1}}}, SpecFaultsError, "only rules can score again"),
        ({"run": "another"}, ContractError, "another"),
    ],
)
def test_what_cannot_be_scored_is_said(
    scored_run: tuple[str, dict[str, str]],
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    def run() -> Iterator[dict[str, Any]]:
        return rescore(request(scored_run[0], tmp_path, **changes))

    with pytest.raises(error, match=words):
        list(run())
    assert list(tmp_path.iterdir()) == []


def test_process_prints_a_line_per_iteration_and_faults_are_bad_input(
    scored_run: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "stages.rescore", "--request", str(tmp_path / "request.json")]
    (tmp_path / "request.json").write_text(request(scored_run[0], tmp_path / "out").model_dump_json())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["iteration"] for line in done.stdout.splitlines()] == [0, 1]

    bad = request(scored_run[0], tmp_path / "out", rewards={"terms": [{"name": "nonsense"}]})
    (tmp_path / "request.json").write_text(bad.model_dump_json())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "known rewards" in done.stderr
