"""Sources, identity, fingerprint and split."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from stages.data.dataset import Dataset, default_environment, load_dataset, split_rows
from stages.data.mixture import mixture_text
from stages.data.rows import PromptRow
from stages.data.spec import DataSpec
from stages.errors import DataError

RECORDS = [
    {"prompt": "2+2?", "answer": "4", "level": 1},
    {"prompt": "3+3?", "answer": 6, "level": 2},
    {"prompt": [{"role": "user", "content": "hi"}], "answer": None, "level": 3},
]


def write_json_lines(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n")
    return str(path)


def spec(source: str, **fields: object) -> DataSpec:
    return DataSpec.model_validate({"source": source, "held_out_fraction": 0.0} | fields)


def test_json_lines_rows_have_prompt_answer_and_metadata(tmp_path: Path) -> None:
    rows = load_dataset(spec(write_json_lines(tmp_path / "sums.jsonl", RECORDS))).train.rows
    assert [(row.prompt, row.answer, row.metadata) for row in rows] == [
        ("2+2?", "4", {"level": 1}),
        ("3+3?", "6", {"level": 2}),
        (({"role": "user", "content": "hi"},), None, {"level": 3}),
    ]
    assert all(row.prompt_id.startswith("sums/") and row.environment == "sums" for row in rows)


def test_parquet_and_json_lines_of_one_content_give_one_fingerprint(tmp_path: Path) -> None:
    records = RECORDS[:1] * 1 + [{"prompt": "5+5?", "answer": "10", "level": 9}]
    lines = write_json_lines(tmp_path / "a.jsonl", records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "b.parquet")
    from_lines = load_dataset(spec(lines, environment="x"))
    from_parquet = load_dataset(spec(str(tmp_path / "b.parquet"), environment="x"))
    assert from_lines.train.rows == from_parquet.train.rows
    assert from_lines.fingerprint == from_parquet.fingerprint


def test_row_survives_json(tmp_path: Path) -> None:
    for row in load_dataset(spec(write_json_lines(tmp_path / "a.jsonl", RECORDS))).train.rows:
        assert PromptRow.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_metadata_that_json_cannot_hold_becomes_text_or_null(tmp_path: Path) -> None:
    record = {"prompt": "p", "answer": True, "day": date(2026, 1, 2), "score": float("nan")}
    table = pa.Table.from_pylist([record])
    pq.write_table(table, tmp_path / "a.parquet")
    data = load_dataset(spec(str(tmp_path / "a.parquet")))
    assert data.train.rows[0].metadata == {"day": "2026-01-02", "score": None}
    assert data.train.rows[0].answer == "true"
    assert len(data.fingerprint) == 64


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_number_that_is_none_is_a_missing_answer(tmp_path: Path, number: float) -> None:
    """Table libraries write a missing number as NaN; as the text "nan" it would pass for a gold answer."""
    records = [{"prompt": "2+2?", "answer": number}, {"prompt": "3+3?", "answer": 6.0}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "b.parquet")
    sources = [write_json_lines(tmp_path / "a.jsonl", records), str(tmp_path / "b.parquet")]

    answers = [[row.answer for row in load_dataset(spec(source)).train.rows] for source in sources]

    assert answers == [[None, "6.0"], [None, "6.0"]]


def test_prompt_id_depends_on_environment_and_content_only(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", RECORDS)
    one = load_dataset(spec(source, environment="x")).train.rows
    reordered = write_json_lines(tmp_path / "b.jsonl", [{**record, "level": 0} for record in reversed(RECORDS)])
    other = load_dataset(spec(reordered, environment="x")).train.rows
    assert [row.prompt_id for row in one] == [row.prompt_id for row in reversed(other)]


def test_i6_same_example_in_two_environments_is_two_prompts(tmp_path: Path) -> None:
    records = [{"id": 7, "env": "a", "prompt": "p", "answer": "1"}, {"id": 7, "env": "b", "prompt": "p", "answer": "1"}]
    source = write_json_lines(tmp_path / "a.jsonl", records)
    rows = load_dataset(spec(source, columns={"prompt_id": "id", "environment": "env"})).train.rows
    assert [row.prompt_id for row in rows] == ["a/7", "b/7"]


def test_missing_columns_are_counted_with_the_first_rows(tmp_path: Path) -> None:
    records = [{"question": f"q{i}", "answer": "1"} for i in range(5)]
    with pytest.raises(DataError, match=r"has 5 row\(s\) that can't be read: row 0: no column \['prompt'\]; it has"):
        load_dataset(spec(write_json_lines(tmp_path / "a.jsonl", records)))


@pytest.mark.parametrize("prompt", ["", None, 3, [], [{"content": "no role"}]])
def test_prompt_of_a_wrong_type_is_refused(tmp_path: Path, prompt: object) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "1"}])
    with pytest.raises(DataError, match=r"is neither text nor a list of|is empty"):
        load_dataset(spec(source))


def test_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "answer": "1"}\n{oops\n')
    with pytest.raises(DataError, match="line 2 is no JSON"):
        load_dataset(spec(str(path)))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            '{"prompt": "é"}\n'.encode("latin-1"),
            "line 3 is no UTF-8 text (byte 12 of the line); save the file as UTF-8",
        ),
        ('{"prompt": "a"}\n'.encode("utf-16"), "line 3 is no UTF-8 text (byte 0 of the line)"),
        (b"[" * 100_000, "line 3 is no JSON: maximum recursion depth exceeded"),
        (b'{"prompt": "a"', "line 3 is no JSON"),
        (b'{"prompt": "\\ud800"}\n', "row 1: column(s) ['prompt'] hold half a character (a lone surrogate)"),
        (b'{"prompt": "b", "x": ["\\ud800"]}\n', "row 1: column(s) ['x'] hold half a character"),
        (b"\x00\x01", "line 3 is no JSON"),
    ],
)
def test_damaged_line_is_named_with_the_file(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n\n' + content)
    with pytest.raises(DataError) as caught:
        load_dataset(spec(str(tmp_path / "a.jsonl"), columns={"answer": None}))
    assert sentence in str(caught.value)
    assert f"data.source '{tmp_path}/a.jsonl'" in str(caught.value)


def test_byte_order_mark_and_carriage_returns_change_nothing(tmp_path: Path) -> None:
    plain = Path(write_json_lines(tmp_path / "a.jsonl", RECORDS[:2]))
    marked = tmp_path / "b.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n"))
    rows = [load_dataset(spec(str(path), environment="x")).train.rows for path in (plain, marked)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("source", ["nope://bucket/a.jsonl", "nope://bucket/a.parquet"])
def test_protocol_that_nobody_knows_is_named(source: str) -> None:
    with pytest.raises(DataError, match=r"can't be read: Protocol not known: nope.*give a path or URL"):
        load_dataset(spec(source))


@pytest.mark.parametrize("damage", ["half", "tail", "head", "nothing", "page"])
def test_damaged_parquet_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "b.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(500)]), path)
    whole = path.read_bytes()
    page = bytes(byte ^ 0xFF for byte in whole[4:200])
    path.write_bytes({
        "half": whole[: len(whole) // 2], "tail": whole[:-3], "head": whole[4:], "nothing": b"",
        "page": whole[:4] + page + whole[200:],
    }[damage])  # fmt: skip
    with pytest.raises(DataError, match=r"data.source '.*b.parquet'"):
        load_dataset(spec(str(path)))


def test_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(DataError, match="is no Parquet file"):
        load_dataset(spec(str(tmp_path / "a.parquet")))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="doesn't exist"):
        load_dataset(spec(str(tmp_path / "none.jsonl")))


def test_empty_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        load_dataset(spec(write_json_lines(tmp_path / "a.jsonl", [])))


def test_unknown_kind_of_source_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"no known kind of source; known: arithmetic:\.\.\., hf:"):
        load_dataset(spec("data.csv"))


def test_duplicates_are_refused_or_dropped_as_the_spec_says(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", [*RECORDS, RECORDS[0]])
    with pytest.raises(DataError, match=r"has 1 duplicate row\(s\), first: a/"):
        load_dataset(spec(source))
    data = load_dataset(spec(source, duplicates="drop"))
    assert (len(data.train), data.num_dropped_duplicates) == (3, 1)


def test_kept_duplicates_have_ids_of_their_own_and_stay_together(tmp_path: Path) -> None:
    """Dropping would change the weights of a mixture; keeping must not put one copy on either side of the split."""
    records = [{"prompt": f"p{n % 10}", "answer": str(n % 10)} for n in range(40)]
    source = write_json_lines(tmp_path / "a.jsonl", records)

    for seed in range(5):
        data = load_dataset(spec(source, duplicates="keep", held_out_fraction=0.25, seed=seed))

        ids = [row.prompt_id for row in (*data.train.rows, *data.held_out.rows)]
        assert (len(set(ids)), data.num_dropped_duplicates) == (40, 0)
        assert {row.prompt for row in data.train.rows}.isdisjoint({row.prompt for row in data.held_out.rows})
        assert len(data.held_out) == 12  # a quarter is 10; three problems of four copies each


def test_kept_duplicates_under_two_ids_keep_them(tmp_path: Path) -> None:
    records = [{"id": i, "prompt": "p", "answer": "1"} for i in (1, 2)]
    source = write_json_lines(tmp_path / "a.jsonl", records)
    data = load_dataset(spec(source, columns={"prompt_id": "id"}, duplicates="keep"))
    assert [row.prompt_id for row in data.train.rows] == ["a/1", "a/2"]


def test_id_that_a_copy_would_get_and_another_problem_has_is_refused(tmp_path: Path) -> None:
    records = [{"id": i, "prompt": p, "answer": "1"} for i, p in (("x", "p"), ("x", "p"), ("x.2", "q"))]
    source = write_json_lines(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError, match=r"uses 1 id\(s\) for different problems, first: a/x\.2"):
        load_dataset(spec(source, columns={"prompt_id": "id"}, duplicates="keep"))


def test_mixture_says_what_dropping_did_to_it(tmp_path: Path) -> None:
    """Small tasks repeat themselves: 30 draws of 3 problems beside 30 of 30."""
    records = [{"prompt": f"s{n % 3}", "answer": "1", "task": "small"} for n in range(30)]
    records += [{"prompt": f"l{n}", "answer": "1", "task": "large"} for n in range(30)]
    source = write_json_lines(tmp_path / "a.jsonl", records)
    columns = {"environment": "task"}

    dropped, kept = (
        load_dataset(spec(source, columns=columns, duplicates=d, held_out_fraction=0.1)) for d in ("drop", "keep")
    )

    shares = dropped.mixture.shares(row.prompt_id for row in (*dropped.train.rows, *dropped.held_out.rows))
    assert shares == {
        "large": {"rows_read": 30, "rows_kept": 30, "share_read": 0.5, "share_kept": 30 / 33},
        "small": {"rows_read": 30, "rows_kept": 3, "share_read": 0.5, "share_kept": 3 / 33},
    }
    assert mixture_text(shares) == (
        "large 50.0 % read, 90.9 % kept (30 of 30 rows); small 50.0 % read, 9.1 % kept (3 of 30 rows)"
    )
    unchanged = kept.mixture.shares(row.prompt_id for row in (*kept.train.rows, *kept.held_out.rows))
    assert {part: (found["share_read"], found["share_kept"]) for part, found in unchanged.items()} == {
        "large": (0.5, 0.5), "small": (0.5, 0.5),
    }  # fmt: skip


def test_equal_problems_under_two_ids_are_duplicates(tmp_path: Path) -> None:
    records = [{"id": i, "prompt": "p", "answer": "1"} for i in (1, 2)]
    with pytest.raises(DataError, match=r"1 duplicate row\(s\), first: a/2"):
        load_dataset(spec(write_json_lines(tmp_path / "a.jsonl", records), columns={"prompt_id": "id"}))


def test_one_id_for_two_problems_is_refused_even_when_duplicates_are_dropped(tmp_path: Path) -> None:
    records = [{"id": 1, "prompt": prompt, "answer": "1"} for prompt in ("p", "q")]
    source = write_json_lines(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError, match=r"uses 1 id\(s\) for different problems, first: a/1"):
        load_dataset(spec(source, columns={"prompt_id": "id"}, duplicates="drop"))


def test_environment_with_a_slash_is_refused() -> None:
    with pytest.raises(DataError, match="holds '/'"):
        load_dataset(spec("arithmetic:addition", environment="a/b", size=10))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/x/y/sums.jsonl", "sums"),
        ("s3://b/k.parquet", "k"),
        ("hf:org/set", "hf:org--set"),
        ("arithmetic:addition", "arithmetic:addition"),
    ],
)
def test_default_environment_never_holds_a_slash(source: str, name: str) -> None:
    assert default_environment(source) == name


def test_arithmetic_has_ten_thousand_fixed_width_problems_split_nine_to_one() -> None:
    data = load_dataset(spec("arithmetic:addition", held_out_fraction=0.1))
    rows = {row.prompt: row.answer for row in (*data.train.rows, *data.held_out.rows)}
    assert (len(data.train), len(data.held_out), len(rows)) == (9000, 1000, 10000)
    assert (rows["07+05="], rows["99+99="], rows["00+00="]) == ("012", "198", "000")
    assert all(len(prompt) == 6 and len(answer) == 3 for prompt, answer in rows.items())


def test_arithmetic_of_a_size_takes_distinct_problems_by_seed() -> None:
    one, again, other = (
        load_dataset(spec("arithmetic:addition", size=50, seed=seed)).fingerprint for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_arithmetic_multiplication_has_four_digits() -> None:
    rows = load_dataset(spec("arithmetic:multiplication")).train.rows
    assert {row.prompt: row.answer for row in rows}["99*99="] == "9801"


def test_arithmetic_of_an_unknown_operation_or_too_many_rows_is_refused() -> None:
    with pytest.raises(DataError, match="known operations are addition, multiplication"):
        load_dataset(spec("arithmetic:division"))
    with pytest.raises(DataError, match=r"data\.size is 10001, but arithmetic:addition has 10000 problems"):
        load_dataset(spec("arithmetic:addition", size=10001))


def test_split_is_disjoint_deterministic_and_independent_of_row_order() -> None:
    rows = load_dataset(spec("arithmetic:addition", size=200)).train.rows
    train, held_out = split_rows(rows, 0.1, seed=3)
    _, held_out_reversed = split_rows(rows[::-1], 0.1, seed=3)
    assert len(held_out) == 20
    assert {row.prompt_id for row in held_out} == {row.prompt_id for row in held_out_reversed}
    assert {row.prompt_id for row in train}.isdisjoint({row.prompt_id for row in held_out})
    assert {row.prompt_id for row in split_rows(rows, 0.1, seed=4)[1]} != {row.prompt_id for row in held_out}


def test_split_that_leaves_nothing_to_train_on_is_refused() -> None:
    rows = load_dataset(spec("arithmetic:addition", size=2)).train.rows
    with pytest.raises(DataError, match="holds out all 2 rows"):
        split_rows(rows, 0.9, seed=0)


def test_held_out_source_that_shares_prompts_is_refused(tmp_path: Path) -> None:
    train = write_json_lines(tmp_path / "train.jsonl", RECORDS)
    test = write_json_lines(tmp_path / "test.jsonl", [RECORDS[0]])
    with pytest.raises(DataError, match=r"shares 1 prompt\(s\) with data\.source: test/"):
        load_dataset(spec(train, held_out_source=test))


def test_held_out_source_of_other_prompts_is_read(tmp_path: Path) -> None:
    train = write_json_lines(tmp_path / "train.jsonl", RECORDS[:2])
    test = write_json_lines(tmp_path / "test.jsonl", RECORDS[2:])
    data = load_dataset(spec(train, held_out_source=test))
    assert (len(data.train), len(data.held_out)) == (2, 1)


def test_two_ways_to_hold_out_are_refused() -> None:
    with pytest.raises(ValidationError, match="either by fraction or by source"):
        DataSpec(source="a.jsonl", held_out_source="b.jsonl")


def test_c13_fingerprint_changes_with_any_content_or_order() -> None:
    rows = load_dataset(spec("arithmetic:addition", size=5)).train.rows
    changed = PromptRow(**{**rows[0].to_json(), "answer": "999"})
    prints = {Dataset(part).fingerprint for part in (rows, rows[::-1], rows[1:], (changed, *rows[1:]))}
    assert len(prints) == 4
    assert Dataset(rows).fingerprint in prints


@pytest.mark.engines
def test_reasoning_gym_rows_depend_on_task_config_and_seed_only() -> None:
    source = "reasoning-gym:chain_sum"
    one, again, other = (load_dataset(spec(source, size=8, seed=seed, duplicates="drop")) for seed in (1, 1, 2))
    assert one.fingerprint == again.fingerprint
    assert one.fingerprint != other.fingerprint
    assert one.train.rows[0].metadata["reasoning_gym"] == {
        "task": "chain_sum",
        "seed": 1,
        "size": 8,
        "config": {},
        "index": 0,
    }


@pytest.mark.engines
def test_reasoning_gym_mixes_tasks_by_weight() -> None:
    parts = [
        {"name": "chain_sum", "weight": 3, "config": {"max_terms": 2}},
        {"name": "gsm_symbolic", "weight": 1, "config": {}},
    ]
    mixed = load_dataset(
        spec("reasoning-gym:composite", size=40, config={"datasets": parts}, duplicates="drop", held_out_fraction=0.0)
    )
    is_sum = [row.prompt.startswith(("State", "Calculate", "What")) or "=" in row.prompt for row in mixed.train.rows]
    assert 0 < sum(is_sum) < len(is_sum)
    shares = mixed.mixture.shares(row.prompt_id for row in mixed.train.rows)
    assert set(shares) == {"chain_sum", "gsm_symbolic"}
    assert sum(found["rows_read"] for found in shares.values()) == 40
    assert shares["chain_sum"]["share_read"] > shares["gsm_symbolic"]["share_read"]


@pytest.mark.engines
def test_reasoning_gym_refuses_unknown_tasks_and_configurations() -> None:
    with pytest.raises(DataError, match=r"reasoning-gym:nonsense .* is refused by the package"):
        load_dataset(spec("reasoning-gym:nonsense"))
    with pytest.raises(DataError, match=r'config \{"bogus":1\} is refused by the package: TypeError'):
        load_dataset(spec("reasoning-gym:chain_sum", config={"bogus": 1}))


@pytest.mark.engines
def test_hf_source_reads_a_dataset_folder_by_its_columns(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "train.jsonl", [{"question": "2+2?", "answer": "4"}])
    data = load_dataset(spec(f"hf:{tmp_path}", columns={"prompt": "question"}, config={"split": "train"}))
    assert [(row.prompt, row.answer) for row in data.train.rows] == [("2+2?", "4")]
    with pytest.raises(DataError, match="can't be loaded"):
        load_dataset(spec(f"hf:{tmp_path}", columns={"prompt": "question"}, config={"split": "nonsense"}))


def test_hf_source_names_unknown_options() -> None:
    with pytest.raises(DataError, match=r"data\.config \['spilt'\] is unknown for hf: sources"):
        load_dataset(spec("hf:org/set", config={"spilt": "train"}))
