"""The pages about rollouts against the same questions answered in plain Python over the rows."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from stages.home import MotleyHome
from storage.removed_rollouts import Removal, write_removals
from storage.rollouts import read_rollouts
from storage.store import open_store
from tests.helpers.page_runs import DAG_ID, client_of, sentence, write_rows, write_run
from tests.helpers.storage_builders import NOW, RUN

URL = f"/dags/{DAG_ID}/rollouts"


@pytest.fixture(scope="module")
def rows(page_home: Path) -> list[dict[str, Any]]:
    families = ("reward", "training")
    return read_rollouts(open_store(str(page_home / "store")), RUN, 1, families=families).to_pylist()


def listed(client: TestClient, **query: Any) -> list[tuple[str, int]]:
    answer = client.get(f"{URL}?{urlencode({'iteration': 1, **query})}")
    assert answer.status_code == 200, answer.text
    return [(name, int(sample)) for name, sample in re.findall(r'">(arithmetic/\d+) \[(\d+)\]</a>', answer.text)]


def key(row: dict[str, Any]) -> tuple[str, int]:
    return row["prompt_id"], row["sample_index"]


FILTERS = [
    ({"prompt": "ARITHMETIC/1"}, lambda r: "arithmetic/1" in r["prompt_id"]),
    ({"prompt": "7 + 1"}, lambda r: "7 + 1" in r["prompt_text"]),
    ({"reward_min": "0.3"}, lambda r: r["reward"] is not None and r["reward"] >= 0.3),
    (
        {"reward_min": "0.3", "reward_max": "0.5"},
        lambda r: r["reward"] is not None and 0.3 <= r["reward"] <= 0.5,
    ),
    ({"status": "unparsable"}, lambda r: r["reward_status"] == "unparsable"),
    ({"status": "unscored"}, lambda r: r["reward_status"] is None),
    ({"finish": "length"}, lambda r: r["finish_reason"] == "length"),
    ({"region": "ohio"}, lambda r: r["region"] == "ohio"),
    ({"version": "1"}, lambda r: True),
    ({"version": "0"}, lambda r: False),
    ({"region": "ohio", "finish": "length", "status": "ok", "reward_min": ""}, lambda r: (
        r["region"] == "ohio" and r["finish_reason"] == "length" and r["reward_status"] == "ok")),
]  # fmt: skip


@pytest.mark.parametrize(("query", "is_wanted"), FILTERS)
def test_filter_shows_exactly_the_rows_that_it_asks_for(
    client: TestClient, rows: list[dict[str, Any]], query: dict[str, str], is_wanted: Any
) -> None:
    wanted = [key(row) for row in rows if is_wanted(row)]
    assert sorted(listed(client, **query)) == sorted(wanted)
    text = client.get(f"{URL}?{urlencode({'iteration': 1, **query})}").text
    assert f"{len(wanted)} of {len(rows)} completions" in text
    file = client.get(f"{URL}.parquet?{urlencode({'iteration': 1, **query})}")
    table = pq.read_table(io.BytesIO(file.content))
    assert sorted(key(row) for row in table.to_pylist()) == sorted(wanted)
    assert {"completion_token_ids", "sampler_logprobs", "reward", "advantage"} <= set(table.column_names)


def by(value: Any, *, is_down: bool = False, is_none_first: bool = False) -> Any:
    def rank(row: dict[str, Any]) -> tuple[bool, float, int, int]:
        found = value(row)
        none = (found is None) != is_none_first
        return none, 0.0 if found is None else (-found if is_down else found), row["prompt_index"], row["sample_index"]

    return rank


@pytest.mark.parametrize(
    ("order", "rank"),
    [
        ("worst", by(lambda r: r["reward"], is_none_first=True)),
        ("best", by(lambda r: r["reward"], is_down=True)),
        ("longest", by(lambda r: len(r["completion_token_ids"]), is_down=True)),
        ("shortest", by(lambda r: len(r["completion_token_ids"]))),
        ("advantage", by(lambda r: r["advantage"])),
        ("prompt", by(lambda r: 0.0)),
    ],
)
def test_order_is_that_of_plain_python(client: TestClient, rows: list[dict[str, Any]], order: str, rank: Any) -> None:
    assert listed(client, order=order) == [key(row) for row in sorted(rows, key=rank)]


def test_worst_come_first_unless_asked_otherwise_and_the_newest_iteration_is_shown(client: TestClient) -> None:
    assert listed(client) == listed(client, order="worst")
    assert "<h2>Iteration 3</h2>" in client.get(URL).text


def test_pages_partition_the_rows(tmp_path: Path) -> None:
    write_run(MotleyHome(tmp_path), iterations=2, num_prompts=70)
    client = client_of(tmp_path)
    pages = [listed(client, page=page) for page in (1, 2, 3, 4)]
    assert [len(page) for page in pages] == [50, 50, 40, 0]
    assert len({row for page in pages for row in page}) == 140
    text = client.get(f"{URL}?iteration=1&page=2&status=ok").text
    assert "page=3" in text
    assert "status=ok" in re.findall(r'href="([^"]*page=3[^"]*)"', html.unescape(text))[0]


def test_download_has_a_name_and_leaves_no_file_behind(client: TestClient, tmp_path: Path) -> None:
    import tempfile

    before = set(Path(tempfile.gettempdir()).glob("motley-*.parquet"))
    answer = client.get(f"{URL}.parquet?iteration=1")
    assert answer.headers["content-disposition"] == f'attachment; filename="{RUN}-train-1.parquet"'
    assert set(Path(tempfile.gettempdir()).glob("motley-*.parquet")) <= before


def test_texts_of_models_and_data_are_never_markup(client: TestClient) -> None:
    for path in (f"{URL}?iteration=1", f"/dags/{DAG_ID}/group?iteration=1&prompt=arithmetic/4"):
        text = client.get(path).text
        assert "alert(1)" in text
        assert "<script>alert" not in text


def test_dag_run_leads_to_the_rollouts_of_its_iteration(client: TestClient) -> None:
    answer = client.get(f"/dags/{DAG_ID}/dag_runs/scheduled__iter-1/rollouts")
    assert answer.headers["location"] == f"{URL}?iteration=1"
    assert sentence(client, f"/dags/{DAG_ID}/dag_runs/other/rollouts")[0] == 404


def test_iteration_that_is_not_there_is_answered_by_what_it_is(tmp_path: Path, page_home: Path) -> None:
    store = write_run(MotleyHome(tmp_path))
    client = client_of(tmp_path)
    assert sentence(client, f"{URL}?iteration=4")[1] == (
        f"Iteration 4 of run {RUN} has no rollouts yet: the run is at iteration 4; look again later."
    )
    assert sentence(client, f"{URL}?iteration=99")[1].startswith(f"Iteration 99 of run {RUN} does not exist: the run")
    assert sentence(client, f"{URL}?split=eval&iteration=2")[1].startswith(f"Policy version 2 of run {RUN} was not")
    for info in [*store.list(f"{RUN}/iterations/1/rollouts")]:
        if info.key.endswith(".parquet"):
            store.delete(info.key)
    status, said = sentence(client, f"{URL}?iteration=1")
    assert (status, "removed by retention or by hand" in said) == (404, True)
    for info in [*store.list(f"{RUN}/iterations/0/rollouts")]:
        store.delete(info.key)
    status, said = sentence(client, f"{URL}?iteration=0")
    assert (status, "removed by retention or by hand" in said) == (410, True)
    removal = Removal(removed_at=NOW, rule="the newest 3 iterations are kept", rows=7, size_bytes=1)
    write_removals(store, RUN, {0: removal})
    status, said = sentence(client, f"{URL}?iteration=0")
    assert (status, "(7 rows) were removed on" in said) == (410, True)


def test_iteration_under_way_is_shown_without_rewards(tmp_path: Path) -> None:
    store = write_run(MotleyHome(tmp_path), iterations=2)
    write_rows(store, 2, 4, has_rewards=False)
    answer = client_of(tmp_path).get(f"{URL}?iteration=2&status=unscored")
    assert "8 of 8 completions" in answer.text


def test_faults_of_a_filter_are_said_together(client: TestClient) -> None:
    status, said = sentence(client, f"{URL}?iteration=-1&reward_min=inf&status=great&page=0")
    assert status == 400
    for name in ("iteration", "reward_min", "status", "page"):
        assert f"{name} is " in said


def test_group_shows_every_token_with_its_numbers_and_the_text_of_the_tokenizer(client: TestClient) -> None:
    text = client.get(f"/dags/{DAG_ID}/group?iteration=1&prompt=arithmetic/4").text
    first = re.findall(r'<span class="t (\w+)" title="([^"]*)">([^<]*)</span>', text)
    assert first[:4] == [
        ("p0", "token 1, log-prob -0.050, reference -0.150", "the"),
        ("p1", "token 2, log-prob -0.500, reference -0.600", " answer"),
        ("p3", "token 3, log-prob -2.000, reference -2.100", " is"),
        ("p5", "token 4, log-prob -7.000, reference -7.100", " two"),
    ]
    assert text.count('<article class="completion') == 2
    assert 'class="completion q2-edge"' in text
    assert 'class="completion n2-edge"' in text


@pytest.mark.parametrize(("colour", "kind"), [("reference", "q1"), ("values", "none"), ("advantage", "q2")])
def test_colour_of_tokens_follows_what_was_asked(client: TestClient, colour: str, kind: str) -> None:
    text = client.get(f"/dags/{DAG_ID}/group?iteration=1&prompt=arithmetic/4&colour={colour}").text
    assert re.findall(r'<span class="t (\w+)" title', text)[0] == kind


def test_group_beside_another_iteration_shows_what_differs(client: TestClient) -> None:
    text = client.get(f"/dags/{DAG_ID}/group?iteration=1&prompt=arithmetic/4&other=2&find=true").text
    assert "the answer is <del>two</del><ins>&lt;script&gt;" in text
    assert re.findall(r'other=(\d)', html.unescape(text.partition('id="occurrences"')[2].partition("</p>")[0])) == [
        "0", "2", "3",
    ]  # fmt: skip


def test_group_of_an_unknown_prompt_is_answered_with_a_sentence(client: TestClient) -> None:
    status, said = sentence(client, f"/dags/{DAG_ID}/group?iteration=1&prompt=nope")
    assert (status, said.startswith(f"Iteration 1 of run {RUN} has no prompt 'nope'")) == (404, True)
    assert sentence(client, f"/dags/{DAG_ID}/group?iteration=1&prompt=arithmetic/4&other=77")[0] == 404
