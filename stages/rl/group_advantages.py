"""Group-relative advantages (GRPO): reward against the mean of the samples of the same prompt group.

Owns the per-group bookkeeping that every estimator shares: grouping by sampling identity, rows without a reward,
groups without signal. Numpy in, numpy out; nothing here knows tokens.

References:
    Shao et al. 2024, DeepSeekMath, section 4.1.2; Liu et al. 2025, Understanding R1-Zero-like training (no division).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.rl.spec import AdvantageSpec

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Advantages of a batch of N rows and what the groups looked like."""

    values: Floats
    """[N]; 0 for invalid rows and in groups without signal."""

    valid: Bools
    """[N]: the row has a reward. Invalid rows belong out of the loss."""

    zero_variance: Bools
    """[N]: the valid rewards of the row's group are all equal (or there is only one): no policy gradient."""

    num_groups: int
    """Groups with at least one valid row."""

    num_zero_variance_groups: int
    """Groups among them without signal; equal to `num_groups` means that nothing can be learned (raise an alarm)."""

    num_empty_groups: int
    """Groups without a valid row."""

    @property
    def has_signal(self) -> Bools:
        """[N]: valid and in a group with signal; the rows that remain with `drop_zero_variance_groups`."""
        return self.valid & ~self.zero_variance


def group_advantages(rewards: Floats, valid: Bools, group_ids: Sequence[Hashable], spec: AdvantageSpec) -> Advantages:
    """(reward - mean of its group) / divisor, from valid rows only.

    Args:
        rewards: [N]; what stands in invalid rows is never read.
        valid: [N], false where the reward has no value (failed verifier, cut completion).
        group_ids: [N], the sampling identity of the group, e.g. (iteration, prompt_id, occurrence). Never the prompt's
            tokens: two groups with equal prompts are two groups (NeMo-RL#3882). Rows may come in any order.
        spec: Normalisation.
    """
    return per_group_advantages(rewards, valid, group_ids, spec, centre_on_mean)


def centre_on_mean(rewards: Floats) -> Floats:
    """Rewards of one group minus their mean."""
    return rewards - _ordered_mean(rewards)


def per_group_advantages(
    rewards: Floats,
    valid: Bools,
    group_ids: Sequence[Hashable],
    spec: AdvantageSpec,
    centre: Callable[[Floats], Floats],
    *,
    keeps_constant: bool = False,
) -> Advantages:
    """Centre each group's valid rewards with `centre`, then divide as `spec.normalisation` says.

    Args:
        rewards: [N]; what stands in invalid rows is never read.
        valid: [N], false where the reward has no value.
        group_ids: [N], sampling identity of the group.
        spec: Normalisation.
        centre: Takes a baseline from the rewards of one group.
        keeps_constant: Whether groups of equal rewards go through `centre` too, since the baseline isn't theirs;
            otherwise they get exactly 0.

    Raises:
        ValueError: Lengths differ, or a valid reward is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    valid = np.asarray(valid, dtype=np.bool_)
    _check(rewards, valid, group_ids)
    values = np.zeros_like(rewards)
    zero_variance = np.zeros_like(valid)
    num_zero_variance = num_empty = 0
    groups = rows_by_group(group_ids)
    batch_std = _sample_std(rewards[valid]) if spec.normalisation == "batch_std" else None
    for rows in groups:
        kept = rows[valid[rows]]
        members = rewards[kept]
        if members.size == 0:
            num_empty += 1
            continue
        if members.min() == members.max():
            zero_variance[rows] = True
            num_zero_variance += 1
        if keeps_constant or members.min() != members.max():
            values[kept] = centre(members) / _divisor(members, batch_std, spec)
    return Advantages(
        values=values,
        valid=valid,
        zero_variance=zero_variance,
        num_groups=len(groups) - num_empty,
        num_zero_variance_groups=num_zero_variance,
        num_empty_groups=num_empty,
    )


def rows_by_group(group_ids: Sequence[Hashable]) -> list[NDArray[np.int64]]:
    """Row numbers of each group, groups in order of first appearance."""
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(group_ids):
        rows.setdefault(group, []).append(row)
    return [np.array(members, dtype=np.int64) for members in rows.values()]


def _check(rewards: Floats, valid: Bools, group_ids: Sequence[Hashable]) -> None:
    if not rewards.shape == valid.shape == (len(group_ids),):
        raise ValueError(
            f"rewards {rewards.shape}, valid {valid.shape} and {len(group_ids)} group ids must have one entry per row"
        )
    bad = np.flatnonzero(valid & ~np.isfinite(rewards))
    if bad.size:
        raise ValueError(
            f"{bad.size} valid reward(s) are not finite, first at row {bad[0]}: {rewards[bad[0]]}; "
            "a failed verification must be marked invalid instead"
        )


def _ordered_mean(rewards: Floats) -> float:
    # Summed in sorted order, so that the order of the rows changes no bit of the result.
    return float(np.sort(rewards).mean())


def _sample_std(rewards: Floats) -> float:
    """Standard deviation with divisor n - 1; 0 for fewer than two rewards."""
    return float(np.sort(rewards).std(ddof=1)) if rewards.size > 1 else 0.0


def _divisor(members: Floats, batch_std: float | None, spec: AdvantageSpec) -> float:
    if spec.normalisation == "none":
        return 1.0
    std = _sample_std(members) if batch_std is None else batch_std
    return max(std, spec.std_floor) + spec.eps
