"""Leave-one-out advantages (RLOO): reward against the mean of the other samples of the prompt group.

References:
    Ahmadian et al. 2024, Back to basics: revisiting REINFORCE-style optimization, equation 7.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from stages.rl.group_advantages import Advantages, Bools, Floats, centre_on_mean, per_group_advantages
from stages.rl.spec import AdvantageSpec


def leave_one_out_advantages(
    rewards: Floats, valid: Bools, group_ids: Sequence[Hashable], spec: AdvantageSpec
) -> Advantages:
    """(reward - mean of the other valid rewards of its group) / divisor.

    A divisor, if the spec asks for one, is the standard deviation of the whole group, not of the others: the latter is
    0 for the odd one out of [1, 0, 0, 0] and gives advantages of 1e6 (NeMo-RL#1518).

    Args:
        rewards: [N]; what stands in invalid rows is never read.
        valid: [N], false where the reward has no value.
        group_ids: [N], sampling identity of the group.
        spec: Normalisation.
    """
    return per_group_advantages(rewards, valid, group_ids, spec, centre_on_others)


def centre_on_others(rewards: Floats) -> Floats:
    """r_i - mean of the others = n / (n - 1) * (r_i - mean of all), for n >= 2 rewards."""
    n = rewards.size
    return centre_on_mean(rewards) * (n / (n - 1))
