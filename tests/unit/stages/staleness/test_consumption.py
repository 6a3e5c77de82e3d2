"""What an iteration trains on, from committed shards on real stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.context import StageContext
from stages.errors import ContractError, StaleRolloutError, WeightMismatchError
from stages.staleness.buffer import RolloutBuffer
from stages.staleness.consumption import buffer_at, consume
from storage.checkpoints import save_checkpoint
from storage.errors import ObjectMissingError
from storage.rollout_schema import Family, prompt_id, row_id
from storage.rollouts import write_family, write_rollouts
from tests.helpers.stage_contexts import make_context, make_run, publish
from tests.helpers.storage_builders import reward_row, rollout_row

FAMILIES = [Family.ROLLOUTS, Family.REWARD]
COLUMNS = {
    Family.ROLLOUTS: ("row_id", "prompt_index", "sample_index", "policy_version_first"),
    Family.REWARD: ("row_id", "reward", "reward_status"),
}


def asynchronous(base: Path, *, bound: int = 1, ahead: int = 2) -> list[StageContext]:
    """Three iterations of two prompts and one spare one, each prompt a shard of its own."""
    more = f"asynchrony: {{spare_prompts: 1, generate_ahead: {ahead}}}\n"
    run = make_run(
        base,
        changes={
            "mode: sync\n": f"mode: async\nmax_staleness: {bound}\n{more}",
            "batch: {prompts: 64, responses_per_prompt: 8}": "batch: {prompts: 2, responses_per_prompt: 2}",
            "samples_per_shard: 256": "samples_per_shard: 2",
        },
    )
    return [make_context(run, base, "train", k) for k in range(3)]


def sample(context: StageContext, *versions: int, digest: str = "", is_scored: bool = True) -> None:
    """Commit the shards of an iteration; group i was sampled from version versions[i]."""
    k, run = context.iteration, context.run.name
    for prompt, version in enumerate(versions):
        rows = [rollout_row(prompt, s, k, policy_version_first=version, policy_version_last=version) for s in range(2)]
        write_rollouts(
            context.home, run, k, prompt, 3, rows, input_fingerprint="f", created_by="test",
            metadata={"weights_hashes": {str(version): digest} if digest else {}},
        )  # fmt: skip
        if is_scored:
            names = [row_id(run, k, prompt_id("arithmetic", prompt), s) for s in range(2)]
            scores = [reward_row(prompt, s, k, row_id=names[s]) for s in range(2)]
            write_family(context.home, run, k, Family.REWARD, prompt, 3, scores, input_fingerprint="f", created_by="t")


def commit(context: StageContext, buffer: RolloutBuffer) -> None:
    """Commit a resume point with a buffer, as stage train does."""
    save_checkpoint(
        context.home, context.run.name, buffer.version, {"random_rank_0.safetensors": b"x"},
        config_hash=context.job.fingerprint, dataset_fingerprint="d", data_position={},
        rng_files=["random_rank_0.safetensors"], created_by="test", metadata={"buffer": buffer.to_json()},
    )  # fmt: skip


def test_batch_takes_waiting_groups_first_and_reads_their_rows(tmp_path: Path) -> None:
    first, second, _ = asynchronous(tmp_path)
    publish(first, 0, is_head=True)
    sample(first, 0, 0, 0)
    sample(second, 0, 0, 1)

    taken = consume(first, FAMILIES).taken
    commit(first, taken.after)
    later = consume(second, FAMILIES)

    assert [group.identity for group in taken.batch] == [(0, 0), (0, 1)]
    assert [group.identity for group in later.taken.batch] == [(0, 2), (1, 0)]
    rows = later.rows(COLUMNS)
    assert [(row["iteration"], row["prompt_index"], row["sample_index"]) for row in rows] == [
        (0, 2, 0), (0, 2, 1), (1, 0, 0), (1, 0, 1),
    ]  # fmt: skip
    assert {row["reward_status"] for row in rows} == {"ok"}
    assert buffer_at(second, 1) == taken.after


def test_groups_over_the_bound_are_withheld_and_their_rows_are_known(tmp_path: Path) -> None:
    first, second, third = asynchronous(tmp_path)
    publish(first, 0, is_head=True)
    sample(first, 0, 0, 0)
    sample(second, 0, 1, 1)
    sample(third, 0, 2, 2)
    for context in (first, second):
        commit(context, consume(context, FAMILIES).taken.after)

    found = consume(third, FAMILIES)

    assert [group.identity for group in found.taken.withheld] == [(2, 0)]
    assert [group.identity for group in found.taken.batch] == [(1, 1), (1, 2)]
    withheld = [(row["iteration"], row["prompt_index"]) for row in found.rows(COLUMNS) if found.is_withheld(row)]
    assert withheld == [(2, 0), (2, 0)]


def test_incomplete_iteration_is_waited_for(tmp_path: Path) -> None:
    """T16: trained on is a complete record of a batch, or nothing."""
    context = asynchronous(tmp_path)[0]
    publish(context, 0, is_head=True)
    sample(context, 0, 0)

    with pytest.raises(ObjectMissingError, match="shards 2 of 3 of family rollouts"):
        consume(context, FAMILIES)


def test_rollouts_older_than_the_gate_allows_fail_closed(tmp_path: Path) -> None:
    third = asynchronous(tmp_path, bound=1, ahead=1)[2]
    publish(third, 0, is_head=True)
    sample(third, 0, 1, 1)

    with pytest.raises(StaleRolloutError, match="may start from version 1 on; repeat stage generate"):
        consume(third, FAMILIES)


def test_rollouts_of_weights_that_were_never_committed_are_refused(tmp_path: Path) -> None:
    context = asynchronous(tmp_path)[0]
    publish(context, 0, is_head=True)
    sample(context, 0, 0, 0, digest="f" * 64)

    with pytest.raises(WeightMismatchError, match="says policy version 0 with weights ffffffffffff"):
        consume(context, FAMILIES)


def test_resume_point_without_its_buffer_is_refused(tmp_path: Path) -> None:
    first, second, _ = asynchronous(tmp_path)
    publish(first, 0, is_head=True)
    sample(second, 0, 0, 0)
    save_checkpoint(
        first.home, "r", 1, {"random_rank_0.safetensors": b"x"}, config_hash=first.job.fingerprint,
        dataset_fingerprint="d", data_position={}, rng_files=["random_rank_0.safetensors"], created_by="test",
    )  # fmt: skip

    with pytest.raises(ContractError, match="version 1 has no usable rollout buffer: it is missing"):
        consume(second, FAMILIES)


def test_buffer_reference_to_a_lost_shard_is_named(tmp_path: Path) -> None:
    first, second, _ = asynchronous(tmp_path)
    publish(first, 0, is_head=True)
    sample(first, 0, 0, 0)
    sample(second, 0, 0, 0)
    commit(first, consume(first, FAMILIES).taken.after)
    first.home.delete("r/iterations/0/rollouts/shard-00002/manifest.json")

    with pytest.raises(
        ObjectMissingError, match="refers to shards 2 of family rollouts of iteration 0, which are gone"
    ):
        consume(second, FAMILIES)


def test_same_data_gives_the_same_fingerprint_and_another_buffer_another_one(tmp_path: Path) -> None:
    first, second, _ = asynchronous(tmp_path)
    publish(first, 0, is_head=True)
    sample(first, 0, 0, 0)
    sample(second, 0, 0, 0)
    commit(first, consume(first, FAMILIES).taken.after)

    digests = consume(second, FAMILIES).digests()

    assert consume(second, FAMILIES).digests() == digests
    assert digests["buffer"]["groups"] == [[0, 0, 2]]
    assert sorted(digests["shards"]) == ["0", "1"]
