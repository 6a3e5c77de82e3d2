"""Advantages of REINFORCE++: what is taken from the reward before returns are formed and normalised.

Returns per token and their normalisation over the batch are `stages.rl.token_targets` with a critic of 0, discount 1
and lambda 1; these two functions say which reward of the response enters there.

References:
    Hu et al. 2025, REINFORCE++, equations 6 to 9.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from stages.rl.group_advantages import (
    Advantages,
    Bools,
    Floats,
    centre_on_mean,
    per_group_advantages,
)
from stages.rl.spec import AdvantageSpec


def plain_rewards(rewards: Floats, valid: Bools, group_ids: Sequence[Hashable], spec: AdvantageSpec) -> Advantages:
    """The rewards themselves; groups are only counted.

    Args:
        rewards: [N]; what stands in invalid rows is never read.
        valid: [N], false where the reward has no value.
        group_ids: [N], sampling identity of the group.
        spec: Of normalisation none: that over the batch's tokens comes after the returns.
    """
    return per_group_advantages(rewards, valid, group_ids, spec, np.array, keeps_constant=True)


def rewards_over_group_mean(
    rewards: Floats, valid: Bools, group_ids: Sequence[Hashable], spec: AdvantageSpec
) -> Advantages:
    """Reward minus the mean of its group's valid rewards; arguments as for `plain_rewards`."""
    return per_group_advantages(rewards, valid, group_ids, spec, centre_on_mean)
