"""Scoring committed completions again: old and new rewards side by side, the run untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from stages.errors import ContractError, EngineUnavailableError, SpecFaultsError, StageError
from stages.rescore import rescore
from stages.rescore_process import RescoreProcess, RescoreRequest
from storage.errors import InvalidInputError, InvalidNameError
from storage.rollouts import write_rollouts
from storage.store import open_store
from storage.verify import verify_run
from tests.helpers.scored_run import EXACT, THREE_DIGITS, content_of, write_scored_run
from tests.helpers.storage_builders import rollout_row


@pytest.fixture(scope="module")
def scored_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """Root of run `r`, and its content."""
    root = write_scored_run(tmp_path_factory.mktemp("run")).home_root
    return root, content_of(root)


def request(root: str, place: Path | None, **changes: Any) -> RescoreRequest:
    target = None if place is None else str(place)
    return RescoreRequest.model_validate({"root": root, "run": "r", "rewards": EXACT, "target": target} | changes)


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
    assert content_of(root) == before


def test_range_of_iterations_and_another_verdict(scored_run: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    (done,) = rescore(request(scored_run[0], tmp_path, rewards=THREE_DIGITS, first=1, last=1))

    statuses = pq.read_table(tmp_path / done["file"], columns=["reward_status"]).column(0).to_pylist()
    assert done["iteration"] == 1
    assert statuses[2:] == ["unparsable", "truncated"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"target": None, "name": "../up"}, InvalidNameError, "name of scores '../up'"),
        ({"first": 5}, ContractError, r"iteration\(s\) 5 \(yet\); there are: 0 to 1"),
        ({"last": 3}, ContractError, r"iteration\(s\) 2, 3 \(yet\); there are: 0 to 1"),
        ({"split": "eval"}, ContractError, r"\(eval\) of iteration\(s\) 0 \(yet\); there are: none"),
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


def test_scores_with_a_name_lie_with_the_run_and_the_same_again_gives_the_same_bytes(tmp_path: Path) -> None:
    root = write_scored_run(tmp_path).home_root
    before = content_of(root)
    done = list(rescore(request(root, None, name="strict", last=0)))
    assert [one["file"] for one in done] == ["r/rescored/strict/train/run=r/iteration=0/rescored.parquet"]
    first = content_of(root)
    assert set(first) - set(before) == {done[0]["file"], "r/rescored/strict/train/run=r/scores.json"}

    assert list(rescore(request(root, None, name="strict"))) == [*done, {**done[0], "iteration": 1, "file": ANY}]
    assert first.items() <= content_of(root).items()
    store = open_store(root)
    assert verify_run(store, "r").findings == []

    with pytest.raises(InvalidInputError, match=r"strict/train/run=r/scores.json: scores of run r by other rewards"):
        list(rescore(request(root, None, name="strict", rewards=THREE_DIGITS)))
    store.publish(done[0]["file"], b"PAR1")
    assert [(one.key, "no complete Parquet file" in one.message) for one in verify_run(store, "r").findings] == [
        (done[0]["file"], True)
    ]


def test_iteration_that_is_not_done_is_refused_and_the_newest_one_is_a_whole_one(tmp_path: Path) -> None:
    root = write_scored_run(tmp_path).home_root
    rows = [rollout_row(0, 0, 2)]
    write_rollouts(open_store(root), "r", 2, 0, 2, rows, input_fingerprint="f", created_by="test")
    with pytest.raises(
        ContractError, match=r"no complete rollouts \(train\) of iteration\(s\) 2 \(yet\); there are: 0 to 1"
    ):
        list(rescore(request(root, None, name="strict", last=2)))
    assert [one["iteration"] for one in rescore(request(root, None, name="strict", first=1))] == [1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "strict"}, "give one of them"),
        ({"target": None}, "give one of them"),
        ({"first": 3, "last": 1}, "below"),
    ],
)
def test_request_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        request("/data", tmp_path, **changes)


def test_process_gives_its_results_and_its_refusals_to_whoever_started_it(
    scored_run: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    with RescoreProcess(sys.executable, request(scored_run[0], tmp_path), os.environ) as process:
        assert [one["iteration"] for one in process.results()] == [0, 1]
    with (
        RescoreProcess(sys.executable, request(scored_run[0], tmp_path, first=7), os.environ) as process,
        pytest.raises(ContractError, match=r"iteration\(s\) 7 \(yet\); there are: 0 to 1"),
    ):
        list(process.results())
    with RescoreProcess(sys.executable, request(scored_run[0], tmp_path), os.environ) as process:
        process.end()
        with pytest.raises(StageError, match="ended with exit code -9"):
            list(process.results())
    with pytest.raises(EngineUnavailableError, match="no-such-python"):
        RescoreProcess("/no-such-python", request(scored_run[0], tmp_path), os.environ).__enter__()


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
