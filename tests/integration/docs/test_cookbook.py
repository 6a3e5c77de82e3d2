"""Every query and every piece of Python in docs/cookbook.md runs on a small run and finds something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from storage.exports import export_rollouts
from storage.layout import Split
from storage.metrics import export_metrics
from storage.rollout_schema import prompt_id, row_id
from storage.rollouts import write_family
from storage.runs import IterationRecord, write_iteration
from storage.sql import connect
from storage.store import Store, open_store
from tests.helpers.storage_builders import NOW, RUN, new_run, write_iteration_data

TEXT = (Path(__file__).parents[3] / "docs" / "cookbook.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", TEXT, re.DOTALL)
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
PROMPTS, SAMPLES = 4, 2


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two iterations of four prompts with two samples, rewarded, trained on and reported."""
    store = open_store(str(tmp_path_factory.mktemp("store")))
    new_run(store)
    for iteration in range(2):
        write_iteration_data(store, iteration, num_prompts=PROMPTS)
        write_family(
            store, RUN, iteration, "training", 0, 1, [_training_row(iteration, n) for n in range(PROMPTS * SAMPLES)],
            input_fingerprint="f", created_by="test",
        )  # fmt: skip
        record = IterationRecord(
            run=RUN, iteration=iteration, policy_version_start=iteration, policy_version_end=iteration + 1,
            started_at=NOW, ended_at=NOW, metrics={"reward_mean": 0.5, "overhead_fraction": 0.1},
        )  # fmt: skip
        write_iteration(store, record)
    export_metrics(store, RUN, created_by="test")
    return store


def _training_row(iteration: int, number: int) -> dict[str, object]:
    prompt, sample = divmod(number, SAMPLES)
    is_dropped = prompt == 0
    return {
        "row_id": row_id(RUN, iteration, prompt_id("arithmetic", prompt), sample),
        "advantage": None if is_dropped else float(sample) - 0.5,
        "is_dropped": is_dropped,
        "dropped_reason": "zero_variance" if is_dropped else None,
        "staleness": 0,
        "logprob_gap_max": 1e-6 * number,
    }


def test_cookbook_has_what_is_tested_here() -> None:
    assert len(QUERIES) >= 12
    assert len(PROGRAMS) == 3


@pytest.mark.parametrize("query", QUERIES, ids=range(len(QUERIES)))
def test_query_answers_with_rows(store: Store, query: str) -> None:
    with connect(store, RUN) as connection:
        rows = connection.execute(query).fetchall()
    assert rows, query


def test_worst_answers_come_first(store: Store) -> None:
    query = next(q for q in QUERIES if "ORDER BY reward NULLS FIRST" in q)
    with connect(store, RUN) as connection:
        rewards = [row[5] for row in connection.execute(query).fetchall()]
    assert rewards == [0.0] * PROMPTS + [1.0] * PROMPTS


def test_dropped_rows_and_those_trained_on_are_all(store: Store) -> None:
    query = next(q for q in QUERIES if "coalesce(dropped_reason" in q)
    with connect(store, RUN) as connection:
        assert connection.execute(query).fetchall() == [
            (k, fate, rows) for k in range(2) for fate, rows in (("trained", 6), ("zero_variance", 2))
        ]


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_program_runs_and_leaves_rows(store: Store, tmp_path: Path, program: str) -> None:
    export_rollouts(store, RUN, open_store(str(tmp_path / "export")), split=Split.TRAIN)
    names = {"root": store.url, "run": RUN, "export": str(tmp_path / "export")}
    found = dict(names)
    exec(program, found)
    (result,) = [found[name] for name in ("table", "wrong", "by_run") if name in found]
    assert len(result) > 0
