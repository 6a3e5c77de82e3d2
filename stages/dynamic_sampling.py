"""Dynamic sampling (DAPO): prompt groups without signal are replaced by groups of further prompts, up to a bound.

Everything happens inside a shard, so that shards stay independent: each has its own further prompts, in an order that
follows from (data seed, iteration), and is committed with all groups that were sampled for it. Those without signal are
left out by training and counted there.

References:
    Yu et al. 2025, DAPO, section 3.2, equation 11 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from stages.partial_rollouts import Sampled
from stages.rewards.protocol import ScoringItem
from stages.rewards.summary import check_verifiers_work
from stages.rl.overlong import soft_overlong_penalty
from stages.verifiers import open_pool
from storage.rollout_schema import FinishReason

if TYPE_CHECKING:
    from stages.prompts import EncodedRow
    from stages.rewards.pool import VerifierPool
    from stages.spec.job import TrainingJob


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """A prompt with its completions."""

    index: int
    """Number of the prompt in the iteration; further prompts follow those of the batch."""
    prompt: EncodedRow
    completions: Sequence[Sampled]


@dataclass(slots=True)
class GroupSet:
    """The groups of one shard while it is being filled."""

    wanted: int
    """Groups with signal that the shard should have."""
    further: Sequence[tuple[int, EncodedRow]]
    """Prompts that may still be sampled, with their numbers."""
    groups: list[SampledGroup] = field(default_factory=list)
    """What was sampled."""
    num_with_signal: int = 0
    """Groups among them with signal."""

    def take(self) -> list[tuple[int, EncodedRow]]:
        """Return, and use up, as many further prompts as groups are missing."""
        count = max(0, self.wanted - self.num_with_signal)
        taken, self.further = list(self.further[:count]), self.further[count:]
        return taken


class Judge(Protocol):
    """Says which groups have signal."""

    def has_signal(self, groups: Sequence[SampledGroup]) -> list[bool]:
        """Return for each group whether its valid rewards differ."""
        ...


class RuleJudge:
    """Judges groups by the job's rules; a context manager, since verifiers are processes."""

    def __init__(self, job: TrainingJob, decode: Callable[[Sequence[Sequence[int]]], list[str]]) -> None:
        """Use `decode` to turn token ids into the texts that verifiers read."""
        self._job, self._decode = job, decode
        self._stack = ExitStack()
        self._pool: VerifierPool | None = None

    def __enter__(self) -> RuleJudge:
        """Start the verifiers."""
        self._pool = self._stack.enter_context(open_pool(self._job.rewards))
        return self

    def __exit__(self, *error: object) -> None:
        """End the verifiers."""
        self._stack.close()

    def has_signal(self, groups: Sequence[SampledGroup]) -> list[bool]:
        """Score all completions; the overlong penalty counts, as it does in training."""
        if self._pool is None:
            raise RuntimeError("a RuleJudge is used inside its with block only")
        completions = [completion for group in groups for completion in group.completions]
        texts = self._decode([completion.token_ids for completion in completions])
        prompts = [group.prompt for group in groups for _ in group.completions]
        results = self._pool.score(
            [
                ScoringItem(row=prompt.row, text=text, finish_reason=FinishReason(completion.finish_reason))
                for prompt, text, completion in zip(prompts, texts, completions, strict=True)
            ]
        )
        check_verifiers_work(results)
        grpo = self._job.grpo
        penalty = soft_overlong_penalty(
            np.array([len(completion.token_ids) for completion in completions], dtype=np.int64),
            max_response_tokens=self._job.planner.lengths.response,
            buffer_tokens=grpo.overlong_buffer_tokens,
            factor=grpo.overlong_factor,
        )
        rewards = [
            None if result.value is None else result.value + float(cost)
            for result, cost in zip(results, penalty, strict=True)
        ]
        found, place = [], 0
        for group in groups:
            members = rewards[place : place + len(group.completions)]
            place += len(group.completions)
            valid = [reward for reward in members if reward is not None]
            found.append(bool(valid) and min(valid) != max(valid))
        return found


def fill(
    sets: Sequence[GroupSet],
    first: Sequence[Sequence[SampledGroup]],
    sample: Callable[[Sequence[tuple[int, EncodedRow]]], list[SampledGroup]],
    judge: Judge,
    max_rounds: int,
) -> int:
    """Add groups to each set until it has signal enough, its prompts are used up, or the rounds are.

    Args:
        sets: One per shard; filled in place.
        first: Groups that were sampled of each shard's own prompts.
        sample: Samples groups of prompts, in order.
        judge: Says which groups have signal.
        max_rounds: Rounds beyond the first one, at most.

    Returns:
        Rounds that were needed.
    """
    _add(sets, first, judge)
    for done in range(max_rounds):
        taken = [shard.take() for shard in sets]
        prompts = [entry for part in taken for entry in part]
        if not prompts:
            return done
        groups, place, parts = sample(prompts), 0, []
        for part in taken:
            parts.append(groups[place : place + len(part)])
            place += len(part)
        _add(sets, parts, judge)
    return max_rounds


def _add(sets: Sequence[GroupSet], parts: Sequence[Sequence[SampledGroup]], judge: Judge) -> None:
    verdicts = judge.has_signal([group for part in parts for group in part])
    place = 0
    for shard, part in zip(sets, parts, strict=True):
        shard.groups.extend(part)
        shard.num_with_signal += sum(verdicts[place : place + len(part)])
        place += len(part)
