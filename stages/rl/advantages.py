"""Advantage estimators by name, and the one call that the training stage makes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

from stages.rl.group_advantages import Advantages, Bools, Floats, group_advantages
from stages.rl.leave_one_out import leave_one_out_advantages
from stages.rl.reinforce_pp import plain_rewards, rewards_over_group_mean
from stages.rl.spec import AdvantageSpec

Estimator = Callable[[Floats, Bools, Sequence[Hashable], AdvantageSpec], Advantages]
"""(rewards [N], valid [N], group_ids [N], spec) to advantages."""

ADVANTAGE_ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "group": group_advantages,
    "rloo": leave_one_out_advantages,
    "reinforce_pp": plain_rewards,
    "reinforce_pp_baseline": rewards_over_group_mean,
}
"""Estimator by its name in `AdvantageSpec.estimator`."""


def estimate_advantages(
    rewards: Floats, valid: Bools, group_ids: Sequence[Hashable], spec: AdvantageSpec
) -> Advantages:
    """Advantages of a batch of N rows with the estimator that the spec names; see `group_advantages`."""
    return ADVANTAGE_ESTIMATORS[spec.estimator](rewards, valid, group_ids, spec)
