"""The data commands run as a person runs them: `motley ...` in a process of its own, on a small committed run."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.home import MotleyHome
from stages.run_entry import MachineEntry, RunEntry
from storage.layout import iteration_record
from storage.runs import IterationRecord, write_iteration
from storage.store import open_store
from tests.helpers.storage_builders import NOW, RUN, new_run, write_iteration_data


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deployment home with one run of two iterations and one entry."""
    path = tmp_path_factory.mktemp("home")
    place = MotleyHome(path)
    store = open_store(str(place.store_dir))
    new_run(store)
    for iteration in range(2):
        write_iteration_data(store, iteration)
        record = IterationRecord(
            run=RUN,
            iteration=iteration,
            policy_version_start=iteration,
            policy_version_end=iteration + 1,
            started_at=NOW,
            ended_at=NOW,
            metrics={"reward_mean": 0.25 + iteration / 2},
            alarms=["all groups have no variance"] if iteration else [],
        )
        write_iteration(store, record)
    entry = RunEntry(
        run=RUN,
        roots={"local": store.url},
        machines=(MachineEntry(name="m-0", queue="m-0", region="local"),),
        iterations=2,
    )
    place.runs_dir.mkdir(parents=True)
    place.run_entry_file(RUN).write_text(entry.to_json(), encoding="utf-8")
    return path


def motley(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MOTLEY_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments], capture_output=True, text=True, env=environment, check=False
    )


def motley_json(home: Path, *arguments: str) -> dict[str, object]:
    done = motley(home, *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, object] = json.loads(done.stdout)
    return document


def test_runs_lists_the_run_with_its_last_reward(home: Path) -> None:
    rows = motley_json(home, "runs")["runs"]
    assert [(row["run"], row["iterations"], row["reward"]) for row in rows] == [(RUN, 2, 0.75)]


def test_show_prints_iterations_curve_and_alarms(home: Path) -> None:
    done = motley(home, "show", RUN)
    assert done.returncode == 0
    assert "1 → 2" in done.stdout
    assert "mean reward of the sampled completions" in done.stdout
    assert "iteration 1: all groups have no variance" in done.stdout


def test_show_of_a_run_by_its_root_needs_no_deployment(home: Path, tmp_path: Path) -> None:
    document = motley_json(tmp_path, "show", f"{home}/store/{RUN}")
    assert [record["iteration"] for record in document["records"]] == [0, 1]


def test_rollouts_ls_counts_rows_prompts_and_shards(home: Path) -> None:
    rows = motley_json(home, "rollouts", "ls", RUN)["iterations"]
    assert [(r["iteration"], r["rows"], r["prompts"], r["shards"], r["reward"]) for r in rows] == [
        (0, 8, 4, 2, 0.5),
        (1, 8, 4, 2, 0.5),
    ]


def test_rollouts_stats_count_statuses(home: Path) -> None:
    rows = motley_json(home, "rollouts", "stats", RUN)["iterations"]
    assert [(row["ok"], row["failed"], row["tokens"], row["cut"]) for row in rows] == [(8, 0, 2.0, 0.0)] * 2


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("iteration = 1", 8),
        ("policy_version_first = 1 AND policy_version_last = 1", 8),
        ("prompt_id = 'arithmetic/2'", 4),
        ("prompt_id = 'arithmetic/2' AND iteration = 1 AND sample_index = 0", 1),
    ],
)
def test_i1_every_row_is_found_by_step_version_and_problem(home: Path, condition: str, rows: int) -> None:
    """I1: users asked for dumps per step."""
    query = f"SELECT count(*) AS n, count(completion_text) AS texts FROM completions WHERE {condition}"
    assert motley_json(home, "rollouts", "sql", RUN, query)["rows"] == [{"n": rows, "texts": rows}]


def test_rollouts_show_prints_one_group_with_rewards_and_logprobs(home: Path) -> None:
    """I4: one group, readable in a terminal."""
    done = motley(home, "rollouts", "show", RUN, "--prompt", "arithmetic/2", "--tokens")
    assert done.returncode == 0
    assert "[0] reward 0, 2 tokens, stop" in done.stdout
    assert "[1] reward 1, 2 tokens, stop" in done.stdout
    assert "22:-0.500" in done.stdout


def test_rollouts_show_of_an_unknown_prompt_exits_2_and_says_where_to_look(home: Path) -> None:
    done = motley(home, "rollouts", "show", RUN, "--prompt", "arithmetic/99")
    assert done.returncode == 2
    assert done.stderr.startswith("Iteration 0 of run-1 has no prompt 'arithmetic/99'")


def test_rollouts_sql_answers_in_json_and_csv(home: Path) -> None:
    """I1, I3: every row can be asked for by iteration, version and prompt."""
    query = "SELECT prompt_id, avg(reward) AS r FROM completions WHERE iteration = 0 GROUP BY 1 ORDER BY 1 LIMIT 2"
    assert motley_json(home, "rollouts", "sql", RUN, query)["rows"] == [
        {"prompt_id": "arithmetic/0", "r": 0.5},
        {"prompt_id": "arithmetic/1", "r": 0.5},
    ]
    done = motley(home, "rollouts", "sql", RUN, query, "--csv", "-")
    assert list(csv.reader(io.StringIO(done.stdout))) == [
        ["prompt_id", "r"],
        ["arithmetic/0", "0.5"],
        ["arithmetic/1", "0.5"],
    ]


def test_rollouts_sql_with_a_wrong_query_exits_2_with_one_sentence(home: Path) -> None:
    done = motley(home, "rollouts", "sql", RUN, "SELECT nothing FROM nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("DuckDB refuses the query:")
    assert len(done.stderr.splitlines()) == 1


def test_unknown_run_exits_2_and_names_those_there_are(home: Path) -> None:
    done = motley(home, "show", "typo")
    assert done.returncode == 2
    assert "(runs there: run-1)" in done.stderr


def test_verify_of_a_whole_run_exits_0_and_of_a_damaged_one_1(home: Path, tmp_path: Path) -> None:
    assert motley_json(home, "verify", RUN)["is_good"] is True
    store = open_store(str(tmp_path))
    new_run(store)
    write_iteration_data(store)
    victim = next(info.key for info in store.list(f"{RUN}/iterations") if info.key.endswith(".parquet"))
    store.publish(victim, b"torn")
    done = motley(tmp_path, "verify", f"{tmp_path}/{RUN}", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["is_good"] is False
    assert done.stderr.startswith(f"Run {RUN} has damaged data")


def test_iteration_record_key_is_where_the_layout_says(home: Path) -> None:
    assert (home / "store" / iteration_record(RUN, 1)).is_file()


def test_rollouts_export_writes_json_lines_as_the_deployment_redacts_them(home: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("redaction: {call: tests.helpers.redactions.hide_sums}")
    arguments = ("rollouts", "export", RUN, "--to", str(tmp_path / "out"), "--format", "jsonl")
    environment = {**os.environ, "MOTLEY_HOME": str(home), "MOTLEY_SETTINGS": str(settings)}
    done = subprocess.run(
        [sys.executable, "-m", "cli", *arguments, "--json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout)["files"]
    assert [file["file"] for file in files] == [f"{RUN}/train/iteration-{k:06d}.jsonl" for k in range(2)]
    rows = [json.loads(line) for line in (tmp_path / "out" / files[1]["file"]).read_text().splitlines()]
    assert {(row["iteration"], row["prompt_text"], row["prompt_token_ids"]) for row in rows} == {(1, "hidden", None)}

    settings.write_text("redaction: {call: not_installed.hide}")
    refused = subprocess.run(
        [sys.executable, "-m", "cli", *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert refused.returncode == 2
    assert "not_installed.hide, which can't be imported" in refused.stderr
