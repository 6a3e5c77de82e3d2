"""Rollout shards and column families; rows of the fault list carry their id in the test's docstring."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import (
    AlreadyPublishedError,
    CorruptObjectError,
    DuplicateRowError,
    InvalidInputError,
    ObjectMissingError,
    SchemaVersionError,
    TransientStorageError,
)
from storage.layout import Split
from storage.manifest import Manifest, PartSource, commit
from storage.parquet_io import MAX_ROW_GROUP_ROWS, encode_table
from storage.rollout_schema import (
    COLUMNS,
    Family,
    arrow_schema,
    group_id,
    prompt_id,
    row_id,
    sample_seed,
)
from storage.rollouts import (
    find_shard,
    iter_shards,
    read_family,
    read_rollouts,
    shard_manifests,
    write_family,
    write_rollouts,
)
from storage.store import Store, open_store
from tests.helpers.faulty_store import Fault, FaultyStore
from tests.helpers.storage_builders import RUN, reward_row, rollout_row, rollout_rows, write_iteration_data

FOLDER = f"{RUN}/iterations/0/rollouts/shard-00000"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path), is_synced=False)


def _write(store: Store, rows: list | pa.Table, shard: int = 0, num_shards: int = 1, **changes: object) -> Manifest:
    fields = {"input_fingerprint": "f", "created_by": "test", **changes}
    return write_rollouts(store, RUN, 0, shard, num_shards, rows, **fields)


def _commit_bytes(store: Store, data: bytes, rows: int, shard: int = 0, num_shards: int = 1) -> None:
    """Commit a Parquet object that this version would not write."""
    commit(
        store,
        f"{RUN}/iterations/0/rollouts/shard-{shard:05d}",
        {"rows.parquet": PartSource(data, rows)},
        kind="rollouts",
        input_fingerprint="g",
        created_by="test",
        metadata={"shard": shard, "num_shards": num_shards},
    )


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _as_table(store: Store, rows: list) -> pa.Table:
    """The file that this version writes for some rows."""
    part = _write(store, rows).parts[0]
    return pq.read_table(io.BytesIO(store.read_bytes(part.path)))


def test_row_comes_back_with_identity_filled_in(store: Store) -> None:
    row = rollout_row(3, 1)
    _write(store, [row])
    found = read_rollouts(store, RUN, 0).to_pylist()
    assert found == [
        {
            **dict.fromkeys(column.name for column in COLUMNS[Family.ROLLOUTS]),
            **row,
            "run": RUN,
            "iteration": 0,
            "split": "train",
            "shard": 0,
            "row_id": row_id(RUN, 0, "arithmetic/3", 1),
            "group_id": group_id(RUN, 0, "arithmetic/3"),
            "sampler_logprobs": [-0.5, -0.25],
        }
    ]


def test_rows_are_the_same_for_every_number_of_shards_and_order_of_rows(tmp_path: Path) -> None:
    """prime-rl defect 10: row assignment depended on the listing order."""
    tables = []
    for number, bounds in enumerate(([0, 6], [0, 2, 6], [0, 1, 2, 3, 4, 5, 6])):
        store = open_store(str(tmp_path / str(number)), is_synced=False)
        ranges = [range(a, b) for a, b in pairwise(bounds)]
        for shard in reversed(range(len(ranges))):
            _write(store, rollout_rows(ranges[shard])[::-1], shard, len(ranges))
        tables.append(read_rollouts(store, RUN, 0).drop_columns(["shard"]))
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


def test_p1_torn_parquet_is_never_read_as_rows(store: Store) -> None:
    """P1: a reader saw a file without a footer."""
    part = _write(store, rollout_rows(range(4))).parts[0]
    data = store.read_bytes(part.path)
    for torn in (b"", data[:4], data[: len(data) // 2], data[:-1], data[:-8] + b"\0" * 8):
        store.publish(part.path, torn)
        with pytest.raises(CorruptObjectError, match=r"rows\.parquet"):
            read_rollouts(store, RUN, 0)


def test_p1_uncommitted_parquet_is_invisible(store: Store) -> None:
    """P1: data objects exist only through their manifest."""
    manifest = _write(store, rollout_rows(range(2)))
    store.delete(manifest.key)
    assert find_shard(store, RUN, 0, 0) is None
    with pytest.raises(ObjectMissingError, match=r"manifest\.json"):
        read_rollouts(store, RUN, 0)


@pytest.mark.parametrize("damage", ["footer", "rows", "zero"])
def test_p2_retry_checks_footer_and_rows_before_it_reuses_a_shard(store: Store, damage: str) -> None:
    """P2: a failed close left a corrupt object which a retry reused."""
    part = _write(store, rollout_rows(range(4))).parts[0]
    assert find_shard(store, RUN, 0, 0, input_fingerprint="f") is not None
    if damage == "footer":
        store.publish(part.path, store.read_bytes(part.path)[:-8] + b"\0" * 8)
    elif damage == "zero":
        store.publish(part.path, b"")
    else:
        manifest = store.read_bytes(f"{FOLDER}/manifest.json").replace(b'"rows": 8', b'"rows": 9')
        store.publish(f"{FOLDER}/manifest.json", manifest)
    assert find_shard(store, RUN, 0, 0, input_fingerprint="f") is None


def test_p6_repeated_attempt_does_not_double_rows(store: Store) -> None:
    """P6: random names let a retry add its rows a second time."""
    first = _write(store, rollout_rows(range(4)), attempt="a1")
    assert _write(store, rollout_rows(range(4)), attempt="a2") == first
    replaced = _write(store, rollout_rows(range(4)), attempt="a3", input_fingerprint="other-weights")
    assert replaced.attempt == "a3"
    assert read_rollouts(store, RUN, 0).num_rows == 8


def test_p6_row_id_in_two_shards_is_refused(store: Store) -> None:
    """P6: duplicates are rejected by row id."""
    _write(store, rollout_rows(range(2)), 0, 2)
    _write(store, rollout_rows(range(1, 3)), 1, 2)
    with pytest.raises(DuplicateRowError, match="2 row ids of rollouts occur twice"):
        read_rollouts(store, RUN, 0)


def test_p6_row_id_twice_in_a_shard_is_refused_on_writing(store: Store) -> None:
    """P6: duplicates are rejected by row id."""
    with pytest.raises(InvalidInputError, match="occurs 2 times"):
        _write(store, [rollout_row(), rollout_row()])
    assert list(store.list("")) == []


def test_i6_same_example_in_two_environments_is_two_rows(store: Store) -> None:
    """I6: the same example id occurred in two environments."""
    names = [prompt_id("sums", 7), prompt_id("products", 7)]
    _write(store, [rollout_row(index, prompt_id=name) for index, name in enumerate(names)])
    found = read_rollouts(store, RUN, 0, columns=["prompt_id", "row_id", "group_id"]).to_pydict()
    assert found["prompt_id"] == names
    assert len(set(found["row_id"])) == len(set(found["group_id"])) == 2


def test_i10_writing_needs_no_lock_and_leaves_no_lock_file(store: Store, tmp_path: Path) -> None:
    """I10: file locks fail on network file systems; each object has one writer."""
    import ast

    import storage

    _write(store, rollout_rows(range(2)), attempt="a1")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["manifest.json", "rows.parquet"]
    imported = set()
    for path in Path(storage.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            imported |= {node.module} if isinstance(node, ast.ImportFrom) else set()
    assert imported & {"fcntl", "filelock", "portalocker", "msvcrt"} == set()


def test_s1_every_sample_has_its_own_seed_whatever_the_placement() -> None:
    """S1: every engine had one seed, so samples were equal."""
    seeds = {
        sample_seed(1, iteration, prompt_id("sums", prompt), sample, split)
        for iteration in range(5)
        for prompt in range(20)
        for sample in range(8)
        for split in Split
    }
    assert len(seeds) == 5 * 20 * 8 * 2
    assert sample_seed(1, 0, "sums/0", 0) != sample_seed(2, 0, "sums/0", 0)


def test_identities_are_pinned() -> None:
    """A change of these numbers would orphan every stored rollout."""
    assert row_id("run", 3, "sums/7", 1) == "bc3a1360d5f9f305c91388578b116143"
    assert row_id("run", 3, "sums/7", 1, "eval") == "61b4830f8fcae4e73c5ae0288fc4beb8"
    assert group_id("run", 3, "sums/7") == "2ab427c67a937b99d475d79cbf881820"
    assert sample_seed(5, 3, "sums/7", 1) == 502135511202476880


def test_shards_missing_are_named_together(store: Store) -> None:
    for shard in (0, 2):
        _write(store, rollout_rows(range(shard, shard + 1)), shard, 4)
    with pytest.raises(ObjectMissingError, match="shards 1, 3 of 4 are not committed"):
        read_rollouts(store, RUN, 0)


def test_shards_of_another_split_into_shards_are_not_mixed_in(store: Store) -> None:
    """A repeated stage with fewer shards: leftovers are ignored, and half-done repeats are refused."""
    for shard in range(4):
        _write(store, rollout_rows(range(shard, shard + 1)), shard, 4)
    _write(store, rollout_rows(range(2)), 0, 2, input_fingerprint="g")
    with pytest.raises(CorruptObjectError, match="belongs to 4 shards, shard 0 to 2"):
        read_rollouts(store, RUN, 0)
    _write(store, rollout_rows(range(2, 4)), 1, 2, input_fingerprint="g")
    assert read_rollouts(store, RUN, 0).num_rows == 8
    assert len(shard_manifests(store, RUN, 0)) == 2


def test_eval_rollouts_live_beside_training_ones(store: Store) -> None:
    """I2: evaluation traces were thrown away."""
    _write(store, rollout_rows(range(2)))
    _write(store, rollout_rows(range(3)), split="eval")
    assert read_rollouts(store, RUN, 0).num_rows == 4
    found = read_rollouts(store, RUN, 0, split="eval", columns=["split", "row_id"])
    assert found["split"].to_pylist() == ["eval"] * 6
    assert found["row_id"][0].as_py() == row_id(RUN, 0, "arithmetic/0", 0, "eval")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"sampler_logprobs": [-0.5]}, "2 completion tokens but 1 sampler_logprobs"),
        ({"sampler_logprobs": [-0.5, float("nan")]}, "column sampler_logprobs holds a number that is not finite"),
        ({"sampler_logprobs": [-0.5, float("-inf")]}, "column sampler_logprobs holds a number that is not finite"),
        ({"sampler_logprobs": [-0.5, None]}, "column sampler_logprobs holds a null inside a list"),
        ({"temperature": float("inf")}, "column temperature holds a number that is not finite"),
        ({"finish_reason": "eos"}, "column finish_reason is 'eos', allowed are stop, length, abort"),
        ({"weights_hash": None}, "column weights_hash is required"),
        ({"advantage": 1.0}, "column advantage is not in the schema"),
        ({"run": "other"}, f"column run is 'other', but '{RUN}' follows"),
        ({"row_id": "x"}, "column row_id is 'x', but"),
        ({"policy_version_first": 2, "policy_version_last": 1}, "policy_version_first 2 is above"),
        ({"completion_token_ids": [2**40, 1]}, "a value does not fit its column"),
        ({"prompt_token_ids": "text"}, "a value does not fit its column"),
    ],
)
def test_bad_row_is_refused_with_its_fault(store: Store, changes: dict, fault: str) -> None:
    with pytest.raises(InvalidInputError, match=fault):
        _write(store, [rollout_row(0, 0), rollout_row(0, 1, **changes)])
    assert list(store.list("")) == []


def test_all_faults_of_a_shard_are_counted(store: Store) -> None:
    rows = [rollout_row(index, finish_reason="eos") for index in range(9)]
    with pytest.raises(InvalidInputError, match=r"row 0: .*row 4: .* and 4 more faults"):
        _write(store, rows)


@pytest.mark.parametrize("shard", [-1, 2, 3])
def test_shard_out_of_range_is_refused(store: Store, shard: int) -> None:
    with pytest.raises(InvalidInputError, match="0 <= shard < num_shards"):
        _write(store, [], shard, 2)


def test_empty_shard_is_a_shard(store: Store) -> None:
    assert _write(store, [], 0, 2).rows == 0
    _write(store, rollout_rows(range(1)), 1, 2)
    assert read_rollouts(store, RUN, 0).num_rows == 2


def test_table_is_accepted_like_rows(store: Store) -> None:
    table = pa.Table.from_pylist(rollout_rows(range(2)))
    _write(store, table)
    assert read_rollouts(store, RUN, 0, columns=["sample_index"]).to_pydict() == {"sample_index": [0, 1, 0, 1]}


def test_provenance_may_differ_between_attempts_but_tokens_may_not(store: Store) -> None:
    first = _write(store, [rollout_row(machine="m-0")])
    assert _write(store, [rollout_row(machine="m-1", ended_at=None)]) == first
    with pytest.raises(AlreadyPublishedError):
        _write(store, [rollout_row(completion_token_ids=[1, 2])])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"reward": None}, "reward is None with status 'ok'"),
        ({"reward_status": "crashed"}, "reward is 0.0 with status 'crashed'"),
        ({"reward": 0.0, "reward_status": "timed_out"}, "a value exactly when ok"),
        ({"reward_status": "failed"}, "allowed are ok, unparsable, truncated, timed_out, crashed"),
    ],
)
def test_failed_reward_has_a_status_and_never_a_value(store: Store, changes: dict, fault: str) -> None:
    with pytest.raises(InvalidInputError, match=fault):
        write_family(store, RUN, 0, "reward", 0, 1, [reward_row(**changes)], input_fingerprint="f", created_by="test")


def test_crashed_reward_stays_null_through_the_join(store: Store) -> None:
    _write(store, rollout_rows(range(1)))
    rows = [reward_row(0, 0), reward_row(0, 1, reward=None, reward_status="crashed", reward_parts=None)]
    write_family(store, RUN, 0, "reward", 0, 1, rows, input_fingerprint="f", created_by="test")
    found = read_rollouts(store, RUN, 0, families=["reward"], columns=["reward", "reward_status"]).to_pylist()
    assert found == [{"reward": 0.0, "reward_status": "ok"}, {"reward": None, "reward_status": "crashed"}]


def test_family_that_lacks_rows_is_refused_unless_asked_for(store: Store) -> None:
    _write(store, rollout_rows(range(1)))
    write_family(store, RUN, 0, "reward", 0, 1, [reward_row(0, 1)], input_fingerprint="f", created_by="test")
    with pytest.raises(CorruptObjectError, match="lacks 1 rows of the rollouts and has 0 rows of none"):
        read_rollouts(store, RUN, 0, families=["reward"])
    found = read_rollouts(store, RUN, 0, families=["reward"], columns=["reward"], is_complete=False)
    assert found.to_pydict() == {"reward": [None, 1.0]}


def test_family_with_rows_of_none_is_refused(store: Store) -> None:
    _write(store, rollout_rows(range(1)))
    rows = [reward_row(prompt, sample) for prompt in range(2) for sample in range(2)]
    write_family(store, RUN, 0, "reward", 0, 1, rows, input_fingerprint="f", created_by="test")
    with pytest.raises(CorruptObjectError, match="lacks 0 rows of the rollouts and has 2 rows of none"):
        read_rollouts(store, RUN, 0, families=["reward"])


def test_column_of_no_family_is_refused(store: Store) -> None:
    write_iteration_data(store)
    with pytest.raises(InvalidInputError, match="columns advantage, nope are in none of rollouts, reward"):
        read_rollouts(store, RUN, 0, columns=["reward", "advantage", "nope"], families=["reward"])


def test_family_is_read_alone_in_the_order_of_row_ids(store: Store) -> None:
    write_iteration_data(store)
    ids = read_family(store, RUN, 0, "reward", columns=["row_id"])["row_id"].to_pylist()
    assert ids == sorted(read_rollouts(store, RUN, 0, columns=["row_id"])["row_id"].to_pylist())


def test_shards_are_iterated_one_by_one(store: Store) -> None:
    write_iteration_data(store, num_prompts=6, num_shards=3)
    counts = [table.num_rows for table in iter_shards(store, RUN, 0, columns=["row_id"])]
    assert counts == [4, 4, 4]


def test_older_file_without_an_optional_column_reads_as_null(store: Store) -> None:
    table = _as_table(store, rollout_rows(range(1)))
    _commit_bytes(store, _parquet(table.drop_columns(["gold_answer", "region"])), 2)
    found = read_rollouts(store, RUN, 0, columns=["gold_answer", "region", "sample_index"])
    assert found.to_pydict() == {"gold_answer": [None, None], "region": [None, None], "sample_index": [0, 1]}


def test_file_with_an_additional_column_is_read(store: Store) -> None:
    """prime-rl defect 9: exact schema equality forbade adding a column."""
    table = _as_table(store, rollout_rows(range(1))).append_column("brand_new", pa.array([1, 2]))
    _commit_bytes(store, _parquet(table), 2)
    assert read_rollouts(store, RUN, 0).num_rows == 2


def test_missing_required_column_names_file_and_column(store: Store) -> None:
    """prime-rl defect 6: a schema error became 0 rows and a timeout far away."""
    table = _as_table(store, rollout_rows(range(1)))
    _commit_bytes(store, _parquet(table.drop_columns(["sampler_logprobs"])), 2)
    with pytest.raises(CorruptObjectError, match=r"rows\.parquet: column sampler_logprobs is required but missing"):
        read_rollouts(store, RUN, 0, columns=["row_id"])


def test_column_of_another_type_names_file_and_column(store: Store) -> None:
    table = _as_table(store, rollout_rows(range(1)))
    place = table.column_names.index("seed")
    _commit_bytes(store, _parquet(table.set_column(place, "seed", table["seed"].cast(pa.string()))), 2)
    with pytest.raises(CorruptObjectError, match=r"column seed has type string, but int64 is needed"):
        read_rollouts(store, RUN, 0)


def test_null_in_a_required_column_names_file_and_column(store: Store) -> None:
    table = _as_table(store, rollout_rows(range(1)))
    place = table.column_names.index("seed")
    nulls = pa.array([None, 1], pa.int64())
    _commit_bytes(store, _parquet(table.set_column(place, pa.field("seed", pa.int64()), nulls)), 2)
    with pytest.raises(CorruptObjectError, match=r"column seed is required but null in 1 rows"):
        read_rollouts(store, RUN, 0)


def test_newer_schema_is_refused(store: Store) -> None:
    table = _as_table(store, rollout_rows(range(1)))
    _commit_bytes(store, _parquet(table.replace_schema_metadata({"motley.schema": "rollouts/3"})), 2)
    with pytest.raises(SchemaVersionError, match="has schema version 3, newer than 2"):
        read_rollouts(store, RUN, 0)


def test_file_of_another_family_is_refused(store: Store) -> None:
    data = encode_table(arrow_schema("values").empty_table())
    _commit_bytes(store, data, 0)
    with pytest.raises(CorruptObjectError, match="holds schema 'values/2', but 'rollouts' is needed"):
        read_rollouts(store, RUN, 0)


def test_flipped_byte_anywhere_is_an_error_or_harmless(store: Store) -> None:
    part = _write(store, [rollout_row(index, completion_text="x" * 500) for index in range(50)]).parts[0]
    data, rows = store.read_bytes(part.path), read_rollouts(store, RUN, 0)
    num_found = 0
    for place in range(4, len(data), 101):
        store.publish(part.path, data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            assert read_rollouts(store, RUN, 0).equals(rows)
        except CorruptObjectError:
            num_found += 1
    assert num_found > len(data) // 101 // 2


def test_network_failure_while_reading_is_transient_and_not_corruption(store: Store) -> None:
    write_iteration_data(store)
    counting = FaultyStore(store)
    read_rollouts(counting, RUN, 0)
    reads = [number for number, (name, _) in enumerate(counting.calls) if name == "read_range"]
    assert reads
    for number in reads:
        with pytest.raises(TransientStorageError):
            read_rollouts(FaultyStore(store, number, Fault.FAIL), RUN, 0)


def test_row_groups_are_bounded(store: Store) -> None:
    schema = arrow_schema("reference")
    count = 2 * MAX_ROW_GROUP_ROWS + 1
    table = pa.table(
        {
            "row_id": [str(number) for number in range(count)],
            "reference_logprobs": [[0.0]] * count,
            "reference_weights_hash": [None] * count,
        },
        schema=schema,
    )
    metadata = pq.ParquetFile(io.BytesIO(encode_table(table))).metadata
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert groups == [MAX_ROW_GROUP_ROWS, MAX_ROW_GROUP_ROWS, 1]


def test_every_column_says_its_meaning() -> None:
    for family in Family:
        for field, column in zip(arrow_schema(family), COLUMNS[family], strict=True):
            assert field.metadata[b"meaning"].decode() == column.meaning
            assert column.meaning.endswith(".")
            assert field.nullable != column.is_required
