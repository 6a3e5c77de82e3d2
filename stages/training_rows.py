"""From committed rollouts to what the trainer gets: staleness, advantages, dropped rows, mini-batches.

Everything here is a function of committed data and the job; the order of rows and mini-batches depends on identities
only, never on shards or placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from stages.engines.protocol import CriticRow, TrainingRow
from stages.errors import StaleRolloutError
from stages.rl.advantages import estimate_advantages
from stages.rl.group_advantages import Advantages, Floats
from stages.rl.overlong import soft_overlong_penalty
from stages.rl.spec import AdvantageSpec
from stages.rl.token_targets import TokenBatch, TokenTargets, token_targets
from stages.spec.job import TrainingJob
from stages.staleness.pacing import lag
from storage.rollout_schema import FinishReason

STALE: Final = "stale"
ABORTED: Final = "aborted"
NO_REWARD: Final = "no_reward"
ZERO_VARIANCE: Final = "zero_variance"
"""Why a row is left out of training; values of the column `dropped_reason`."""

_PLAIN: Final = AdvantageSpec(estimator="reinforce_pp", normalisation="none")


@dataclass(frozen=True, kw_only=True)
class PreparedRows:
    """Rows of an iteration with everything that training decided about them."""

    rows: Sequence[Mapping[str, Any]]
    """Joined rows of the families, by (iteration, prompt_index, sample_index). [N]"""
    reasons: Sequence[str | None]
    """Why each row is left out; None = it is trained on. [N]"""
    staleness: Sequence[int]
    """Trained policy version minus the version that sampled the first token. [N]"""
    advantages: Advantages
    """Advantages and group counts. [N]"""
    tokens: TokenTargets | None = None
    """Advantages token by token and the critic's targets (PPO, REINFORCE++); None = one advantage per response."""

    @property
    def kept(self) -> list[int]:
        """Places of the rows that are trained on, in order."""
        return [place for place, reason in enumerate(self.reasons) if reason is None]

    def advantage(self, place: int) -> float | None:
        """Advantage of a row, or the mean over its tokens; None when it is left out."""
        if self.reasons[place] is not None:
            return None
        return float(self.advantages.values[place] if self.tokens is None else self._row_means[place])

    @cached_property
    def _row_means(self) -> Floats:
        return self.advantages.values if self.tokens is None else self.tokens.row_means()

    def counts(self) -> dict[str, int]:
        """Rows, kept rows, rows left out by reason, groups by kind."""
        by_reason = Counter(reason for reason in self.reasons if reason is not None)
        return {
            "rows": len(self.rows),
            "rows_trained": len(self.kept),
            **{f"dropped_{name}": by_reason[name] for name in (STALE, ABORTED, NO_REWARD, ZERO_VARIANCE)},
            "groups": self.advantages.num_groups,
            "groups_zero_variance": self.advantages.num_zero_variance_groups,
            "groups_empty": self.advantages.num_empty_groups,
        }

    def training_rows(self) -> list[TrainingRow]:
        """Return the kept rows as the engine takes them, [K]."""
        return [
            TrainingRow(
                row_id=row["row_id"],
                prompt_token_ids=row["prompt_token_ids"],
                completion_token_ids=row["completion_token_ids"],
                advantage=self.advantage(place) or 0.0,
                token_advantages=None if self.tokens is None else self.tokens.advantages_of(place),
                sampler_logprobs=row["sampler_logprobs"],
                temperature=row["temperature"],
                reference_logprobs=row.get("reference_logprobs"),
            )
            for place in self.kept
            for row in (self.rows[place],)
        ]

    def critic_rows(self) -> list[CriticRow]:
        """Return the kept rows as the critic's engine takes them, [K]; only with `tokens`."""
        if self.tokens is None:
            raise ValueError("the rows were prepared without token targets, so a critic can't learn from them")
        return [
            CriticRow(
                row_id=self.rows[place]["row_id"],
                prompt_token_ids=self.rows[place]["prompt_token_ids"],
                completion_token_ids=self.rows[place]["completion_token_ids"],
                old_values=self.tokens.values_of(place),
                returns=self.tokens.returns_of(place),
            )
            for place in self.kept
        ]


def prepare_rows(
    rows: Sequence[Mapping[str, Any]],
    job: TrainingJob,
    version: int,
    *,
    is_withheld: Callable[[Mapping[str, Any]], bool] = lambda _: False,
    kl_weight: float = 0.0,
) -> PreparedRows:
    """Decide which rows are trained on and with which advantage.

    Args:
        rows: Joined rows of whole prompt groups, by (iteration, prompt_index, sample_index).
        job: The job.
        version: Policy version that training starts from; the age of a rollout is counted here, at consumption.
        is_withheld: Says whether the buffer withholds a row's group.
        kl_weight: Factor of the KL penalty in this iteration; read where it is part of the reward.

    Raises:
        StaleRolloutError: a rollout is of a later version, or every one is too old although generation is not allowed
            to run ahead so far.
    """
    staleness = [lag(version, int(row["policy_version_first"])) for row in rows]
    _check_ages(staleness, max(job.max_staleness, job.generate_ahead), version)
    early = [
        STALE if is_withheld(row) else _early_reason(row, age, job.max_staleness)
        for row, age in zip(rows, staleness, strict=True)
    ]
    has_reward = [row["reward"] is not None for row in rows]
    valid = np.array([reason is None and has for reason, has in zip(early, has_reward, strict=True)], dtype=np.bool_)
    lengths = np.array([len(row["completion_token_ids"]) for row in rows], dtype=np.int64)
    penalty = soft_overlong_penalty(
        lengths,
        max_response_tokens=job.planner.lengths.response,
        buffer_tokens=job.grpo.overlong_buffer_tokens,
        factor=job.grpo.overlong_factor,
    )
    rewards = np.array([0.0 if row["reward"] is None else row["reward"] for row in rows], dtype=np.float64) + penalty
    groups = [str(row["group_id"]) for row in rows]
    # PPO takes the rewards as they are: its baseline is the critic.
    spec = _PLAIN if job.ppo is not None else job.grpo.advantage
    advantages = estimate_advantages(rewards, valid, groups, spec)
    reasons: list[str | None] = []
    for place, reason in enumerate(early):
        if reason is not None:
            reasons.append(reason)
        elif not valid[place]:
            reasons.append(NO_REWARD)
        elif job.grpo.drop_zero_variance_groups and advantages.zero_variance[place]:
            reasons.append(ZERO_VARIANCE)
        else:
            reasons.append(None)
    tokens = _token_targets(rows, advantages, [reason is None for reason in reasons], job, kl_weight)
    return PreparedRows(rows=rows, reasons=reasons, staleness=staleness, advantages=advantages, tokens=tokens)


def _token_targets(
    rows: Sequence[Mapping[str, Any]], advantages: Advantages, kept: Sequence[bool], job: TrainingJob, kl_weight: float
) -> TokenTargets | None:
    """Return what the tokens learn from; None where an advantage belongs to a whole response."""
    ppo = job.ppo
    if ppo is None and not job.grpo.advantage.is_per_token:
        return None
    batch = TokenBatch(
        rewards=advantages.values,
        kept=np.array(kept, dtype=np.bool_),
        policy_logprobs=[row["sampler_logprobs"] for row in rows],
        reference_logprobs=[row["reference_logprobs"] for row in rows] if job.needs_reference else None,
        values=None if ppo is None else [row["values"] for row in rows],
    )
    is_in_reward = job.kl.place == "reward"
    return token_targets(
        batch,
        discount=1.0 if ppo is None else ppo.discount,
        gae_lambda=1.0 if ppo is None else ppo.gae_lambda,
        kl_estimator=job.kl.estimator if is_in_reward else "k1",
        kl_weight=kl_weight if is_in_reward else 0.0,
        is_whitened=ppo is None or ppo.whiten_advantages,
    )


def mini_batches(prepared: PreparedRows, job: TrainingJob, seed: int, iteration: int) -> list[list[int]]:
    """Return the rows of every optimizer step, as indices into `prepared.training_rows()`, epochs unrolled.

    Whole prompt groups are dealt to mini-batches in an order drawn anew in each epoch from (seed, iteration, epoch).
    A mini-batch in which no row is kept makes no optimizer step.
    """
    index_of = {place: index for index, place in enumerate(prepared.kept)}
    groups: dict[tuple[int, int], list[int]] = {}
    for place, row in enumerate(prepared.rows):
        if prepared.reasons[place] != STALE:
            groups.setdefault((int(row.get("iteration", iteration)), int(row["prompt_index"])), []).append(place)
    if job.grpo.dynamic_sampling is not None:
        # Groups were replaced so that every mini-batch gets its share of signal; those without count no more.
        groups = {prompt: places for prompt, places in groups.items() if any(place in index_of for place in places)}
    prompts = sorted(groups)
    if not prompts:
        return []
    count = job.grpo.num_mini_batches
    size = -(-len(prompts) // count)
    steps: list[list[int]] = []
    for epoch in range(job.grpo.num_epochs):
        order = np.random.default_rng([seed, iteration, epoch]).permutation(len(prompts)).tolist()
        for first in range(0, len(prompts), size):
            places = [place for p in order[first : first + size] for place in groups[prompts[p]]]
            steps.append([index_of[place] for place in places if place in index_of])
    return [step for step in steps if step]


def _check_ages(staleness: Sequence[int], limit: int, version: int) -> None:
    youngest, oldest = min(staleness, default=0), max(staleness, default=0)
    if youngest < 0:
        raise StaleRolloutError(
            f"a rollout was sampled from policy version {version - youngest}, but training starts from version "
            f"{version}: the iteration was committed before; do not repeat it.",
            version=version,
        )
    if youngest > limit:
        raise StaleRolloutError(
            f"every rollout lags {youngest} to {oldest} policy versions behind version {version}, but max_staleness is "
            f"{limit}; repeat stage generate.",
            version=version,
            staleness=youngest,
        )


def _early_reason(row: Mapping[str, Any], age: int, limit: int) -> str | None:
    if row["finish_reason"] == FinishReason.ABORT:
        return ABORTED
    return STALE if age > limit else None
