"""Replacement of groups without signal: what is sampled, when it ends, what training makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stages.data.order import further_order
from stages.dynamic_sampling import GroupSet, RuleJudge, SampledGroup, fill
from stages.partial_rollouts import Sampled
from stages.prompts import EncodedRow
from stages.spec.job import load_training_job
from stages.training_rows import mini_batches, prepare_rows
from tests.helpers.stage_contexts import JOB
from tests.unit.stages.test_training_rows import row


class Fixed:
    """Says of prompt numbers whether they have signal."""

    def __init__(self, dead: set[int]) -> None:
        self.dead, self.asked = dead, list[list[int]]()

    def has_signal(self, groups: Sequence[SampledGroup]) -> list[bool]:
        self.asked.append([group.index for group in groups])
        return [group.index not in self.dead for group in groups]


def group(index: int) -> SampledGroup:
    return SampledGroup(index, None, ())  # type: ignore[arg-type]  # `fill` looks at numbers only


def run_fill(dead: set[int], *, max_rounds: int = 3, further: int = 6) -> tuple[list[list[int]], int, Fixed]:
    """Two shards of two prompts each (0, 1 and 2, 3); further prompts from 4 on, dealt in turn."""
    sets = [GroupSet(2, [(4 + 2 * n + shard, None) for n in range(further)]) for shard in (0, 1)]  # type: ignore[list-item]
    judge = Fixed(dead)
    rounds = fill(
        sets, [[group(0), group(1)], [group(2), group(3)]], lambda prompts: [group(i) for i, _ in prompts], judge,
        max_rounds,
    )  # fmt: skip
    return [[entry.index for entry in shard.groups] for shard in sets], rounds, judge


def test_nothing_is_added_where_every_group_has_signal() -> None:
    groups, rounds, _ = run_fill(set())
    assert (groups, rounds) == ([[0, 1], [2, 3]], 0)


def test_each_shard_replaces_its_own_dead_groups_from_its_own_prompts() -> None:
    """Shard 0 lost one, shard 1 both; 7 is dead too, so shard 1 needs a second round."""
    groups, rounds, judge = run_fill({1, 2, 3, 7})
    assert groups == [[0, 1, 4], [2, 3, 5, 7, 9]]
    assert rounds == 2
    assert judge.asked == [[0, 1, 2, 3], [4, 5, 7], [9]]


def test_rounds_are_bounded() -> None:
    groups, rounds, _ = run_fill(set(range(100)), max_rounds=2)
    assert rounds == 2
    assert [len(part) for part in groups] == [2 + 2 + 2, 2 + 2 + 2]


def test_prompts_that_run_out_end_it() -> None:
    groups, rounds, _ = run_fill(set(range(100)), further=1)
    assert groups == [[0, 1, 4], [2, 3, 5]]
    assert rounds == 1


def test_further_prompts_are_others_than_the_batchs_and_follow_from_seed_and_iteration() -> None:
    ids = [f"p{n}" for n in range(10)]
    found = further_order(ids, ["p3", "p7"], seed=1, iteration=4, count=5)
    assert found == further_order(ids, ["p7", "p3"], seed=1, iteration=4, count=5)
    assert len(set(found)) == 5
    assert not {3, 7} & set(found)
    assert found != further_order(ids, ["p3", "p7"], seed=1, iteration=5, count=5)
    assert len(further_order(ids, ["p3"], seed=1, iteration=0, count=99)) == 9


def completion(length: int) -> Sampled:
    return Sampled(token_ids=[5] * length, logprobs=[-1.0] * length, finish_reason="stop")


def judged(texts: list[str], lengths: list[int], grpo: str = "") -> list[bool]:
    from stages.data.rows import PromptRow

    job = load_training_job(JOB.replace("  loss: grpo\n", f"  loss: grpo\n{grpo}"), "job.yaml")
    prompt = EncodedRow(
        row=PromptRow(prompt_id="a/1", environment="a", prompt="1+1=", answer="2"), text="1+1=", token_ids=(1,)
    )
    pairs = [SampledGroup(0, prompt, [completion(n) for n in lengths])]
    with RuleJudge(job, lambda _: texts) as judge:
        return judge.has_signal(pairs)


def test_group_has_signal_when_its_rewards_differ() -> None:
    assert judged(["2", "3"], [2, 2]) == [True]
    assert judged(["2", "2"], [2, 2]) == [False]


def test_overlong_penalty_gives_signal_as_it_does_in_training() -> None:
    assert judged(["2", "2"], [2, 4]) == [False]
    assert judged(["2", "2"], [2, 4], "  overlong_buffer_tokens: 2\n") == [True]


def test_mini_batches_share_the_groups_with_signal() -> None:
    """N7: four of six groups are dead; with replacement both mini-batches get one of the two others."""
    text = JOB.replace("num_mini_batches: 1", "num_mini_batches: 2\n  dynamic_sampling: {max_rounds: 1}")
    job = load_training_job(text, "job.yaml")
    rows: list[dict[str, Any]] = [row(p, s, float(s) if p in {1, 5} else 1.0) for p in range(6) for s in (0, 1)]
    prepared = prepare_rows(rows, job, 3)
    steps = mini_batches(prepared, job, seed=0, iteration=0)
    assert [len(step) for step in steps] == [2, 2]
    dead = prepare_rows([row(p, s, 1.0) for p in range(6) for s in (0, 1)], job, 3)
    assert mini_batches(dead, job, seed=0, iteration=0) == []


def test_replacement_without_leaving_out_is_refused() -> None:
    from stages.errors import SpecFaultsError

    text = JOB.replace("num_mini_batches: 1", "drop_zero_variance_groups: false\n  dynamic_sampling: {}")
    with pytest.raises(SpecFaultsError, match="so they would be trained on too"):
        load_training_job(text, "job.yaml")
