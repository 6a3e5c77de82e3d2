"""Key functions and parser are inverse; names never leave their folder; identities never collide."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import layout
from storage.errors import InvalidNameError
from storage.layout import Split
from storage.names import escape_name, unescape_name
from storage.parsed_keys import Kind, ParsedKey, parse_key
from storage.rollout_schema import Family, group_id, prompt_id, row_id, sample_seed
from storage.store import checked_key

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy: no example is judged by its time."""

ALPHABET = "abcXYZ0123456789._~-"
names = st.text(ALPHABET, min_size=1, max_size=40).filter(lambda text: text[0] not in ".~-")
attempts = names.filter(lambda text: not text.isdecimal() and not text.endswith(".json"))
numbers = st.integers(0, 10**9)
shards = st.integers(0, 10**6)
splits = st.sampled_from(Split)
families = st.sampled_from(Family)
file_names = st.lists(names, min_size=1, max_size=3).map("/".join)


@unhurried
@given(run=names, number=numbers, name=names)
def test_single_document_keys_parse_back(run: str, number: int, name: str) -> None:
    expected = {
        layout.run_record(run): ParsedKey(kind=Kind.RUN_RECORD, run=run),
        layout.retention_ledger(run): ParsedKey(kind=Kind.RETENTION, run=run),
        layout.profile(run, number): ParsedKey(kind=Kind.PROFILE, run=run, number=number),
        layout.profile(run, number, name): ParsedKey(kind=Kind.PROFILE, run=run, number=number, name=name),
        layout.plan(run, number): ParsedKey(kind=Kind.PLAN, run=run, number=number),
        layout.iteration_record(run, number): ParsedKey(kind=Kind.ITERATION_RECORD, run=run, number=number),
        layout.iteration_plan(run, number): ParsedKey(kind=Kind.ITERATION_PLAN, run=run, number=number),
        layout.policy_head(run): ParsedKey(kind=Kind.POLICY_HEAD, run=run),
        layout.checkpoint_index(run): ParsedKey(kind=Kind.CHECKPOINT_INDEX, run=run),
        layout.lease(run, name): ParsedKey(kind=Kind.LEASE, run=run, name=name),
        layout.removed_rollouts(run): ParsedKey(kind=Kind.REMOVED, run=run),
        layout.reader_turn(run, name): ParsedKey(kind=Kind.READER, run=run, name=layout.escape_name(name)),
        layout.gang_epoch(run, number, "task", 2): ParsedKey(kind=Kind.GANG, run=run, number=number, name="task"),
        layout.gang_member(run, number, "task", 2, name): ParsedKey(
            kind=Kind.GANG, run=run, number=number, name="task"
        ),
    }
    scores = f"{layout.rescored_folder(run, name, 'eval')}/{layout.partition_folder(run)}/scores.json"
    scored = f"{layout.rescored_folder(run, name)}/{layout.partition_folder(run, number)}/rescored.parquet"
    expected |= {
        scores: ParsedKey(kind=Kind.RESCORED, run=run, name=name, split=Split.EVAL),
        scored: ParsedKey(kind=Kind.RESCORED, run=run, name=name, number=number),
    }
    for key in (scores, scored):
        later = key.removeprefix(f"{run}/")
        expected[layout.superseded(run, number, later)] = ParsedKey(
            kind=Kind.SUPERSEDED, run=run, number=number, name=later
        )
    assert len(expected) == 18
    assert {key: parse_key(key) for key in expected} == expected


@unhurried
@given(run=names, number=numbers, family=families, shard=shards, split=splits, attempt=attempts, name=file_names)
def test_artefact_keys_parse_back(
    run: str, number: int, family: Family, shard: int, split: Split, attempt: str, name: str
) -> None:
    artefacts = {
        layout.shard_folder(run, number, family, shard, split): {
            "kind": Kind.SHARD,
            "number": number,
            "family": family,
            "split": split,
            "shard": shard,
        },
        layout.policy_folder(run, number): {"kind": Kind.POLICY, "number": number},
        layout.checkpoint_folder(run, number): {"kind": Kind.CHECKPOINT, "number": number},
        layout.critic_folder(run, number): {"kind": Kind.CRITIC, "number": number},
        layout.metrics_folder(run): {"kind": Kind.METRICS},
    }
    for folder, fields in artefacts.items():
        manifest, data = layout.manifest_key(folder), layout.data_key(folder, attempt, name)
        assert parse_key(manifest) == ParsedKey(run=run, **fields)
        assert parse_key(data) == ParsedKey(run=run, attempt=attempt, name=name, **fields)
        assert parse_key(data).is_data


@unhurried
@given(first=st.tuples(names, numbers, names), second=st.tuples(names, numbers, names))
def test_different_places_have_different_keys(first: tuple[str, int, str], second: tuple[str, int, str]) -> None:
    def keys(place: tuple[str, int, str]) -> set[str]:
        run, number, name = place
        return {layout.profile(run, number, name), layout.policy_folder(run, number), layout.lease(run, name)}

    for one in keys(first):
        for other in keys(second):
            if one == other:
                assert parse_key(one + "/manifest.json" if "policies" in one else one).run == first[0] == second[0]


@unhurried
@given(text=st.text(min_size=1, max_size=30))
def test_any_text_becomes_one_harmless_segment_and_comes_back(text: str) -> None:
    try:
        name = escape_name(text)
    except InvalidNameError:
        assert len(text.encode("utf-8", "surrogatepass")) * 3 > 100
        return
    assert unescape_name(name) == text
    key = layout.lease("run", name)
    assert posixpath.normpath(key) == checked_key(key) == key
    assert key.count("/") == 2


@unhurried
@given(text=st.text(min_size=1, max_size=12))
def test_run_name_is_refused_unless_it_is_one_segment(text: str) -> None:
    try:
        key = layout.run_record(text)
    except InvalidNameError:
        return
    assert posixpath.normpath(key) == key
    assert key.split("/") == [text, "run.json"]


@unhurried
@given(key=st.text(ALPHABET + "/", max_size=60))
def test_parser_accepts_or_refuses_but_never_breaks(key: str) -> None:
    try:
        parsed = parse_key(key)
    except InvalidNameError:
        return
    assert key.startswith(f"{parsed.run}/")


identities = st.tuples(names, splits, numbers, st.text(min_size=1, max_size=20), st.integers(0, 100))


@unhurried
@given(one=identities, other=identities)
def test_row_ids_are_equal_exactly_for_equal_identities(one: tuple, other: tuple) -> None:
    ids = [row_id(run, k, prompt, sample, split) for run, split, k, prompt, sample in (one, other)]
    assert (ids[0] == ids[1]) == (one == other)
    groups = [group_id(run, k, prompt, split) for run, split, k, prompt, _ in (one, other)]
    assert (groups[0] == groups[1]) == (one[:4] == other[:4])


@unhurried
@given(seed=st.integers(0, 2**63 - 1), identity=identities)
def test_sample_seed_is_63_bits_and_does_not_depend_on_the_run_name(seed: int, identity: tuple) -> None:
    _, split, iteration, prompt, sample = identity
    found = sample_seed(seed, iteration, prompt, sample, split)
    assert 0 <= found < 2**63
    assert found == sample_seed(seed, iteration, prompt, sample, split)
    assert found != sample_seed(seed, iteration, prompt, sample + 1, split)
    assert found != sample_seed(seed, iteration + 1, prompt, sample, split)
    assert found != sample_seed(seed + 1, iteration, prompt, sample, split)


@unhurried
@given(environment=st.text(min_size=1, max_size=10), example=st.text(max_size=10))
def test_prompt_id_names_environment_and_example(environment: str, example: str) -> None:
    if "/" in environment:
        with pytest.raises(ValueError, match="without '/'"):
            prompt_id(environment, example)
    else:
        assert prompt_id(environment, example).split("/", 1) == [environment, example]
