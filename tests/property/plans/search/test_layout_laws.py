"""Layouts of recipes follow the plain rules for any units."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from plans.search.compiled.layouts import REPLICA_BLOCKS, SLOW_ENDS, STAGE_BLOCKS, lay_out


@njit
def laid_out_by_machine_code(units, speeds, pp, tp, arrangement, gpus):
    return lay_out(units, speeds, pp, tp, arrangement, gpus)


def laid_out(speeds, pp, tp, arrangement):
    """Return the GPUs by machine code [dp, pp, tp]; None where there is no layout."""
    units = np.arange(len(speeds) * tp, dtype=np.int64) + 100
    gpus = np.empty(len(units), dtype=np.int64)
    dp = laid_out_by_machine_code(units, np.array(speeds), pp, tp, arrangement, gpus)
    return gpus[: dp * pp * tp].reshape(dp, pp, tp) if dp else None


def strongest(speeds, count):
    ranked = sorted(range(len(speeds)), key=lambda unit: -speeds[unit])
    return sorted(ranked[:count])


def with_slow_ends(speeds, dp, pp):
    slow = [unit for unit, speed in enumerate(speeds) if speed == min(speeds)]
    fast = [unit for unit, speed in enumerate(speeds) if speed > min(speeds)]
    ends = max(len(slow) // dp, pp - len(fast) // dp)
    inner = pp - ends
    if not ends or inner < 1 or ends * dp > len(slow):
        return None
    pipelines = []
    for replica in range(dp):
        outside = slow[replica * ends : (replica + 1) * ends]
        pipelines.append(outside[: ends // 2] + fast[replica * inner : (replica + 1) * inner] + outside[ends // 2 :])
    return pipelines


@settings(max_examples=300, deadline=None)
@given(speeds=st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=1, max_size=14), pp=st.integers(1, 15),
       tp=st.integers(1, 3), arrangement=st.sampled_from([REPLICA_BLOCKS, STAGE_BLOCKS, SLOW_ENDS]))  # fmt: skip
def test_units_become_replicas_and_stages_by_the_plain_rules(speeds, pp, tp, arrangement):
    dp = len(speeds) // pp
    expected = None
    if dp and arrangement == SLOW_ENDS:
        expected = with_slow_ends(speeds, dp, pp)
    elif dp and arrangement == REPLICA_BLOCKS:
        chosen = strongest(speeds, dp * pp)
        expected = [chosen[replica * pp : (replica + 1) * pp] for replica in range(dp)]
    elif dp > 1 and pp > 1:
        chosen = strongest(speeds, dp * pp)
        expected = [[chosen[stage * dp + replica] for stage in range(pp)] for replica in range(dp)]
    found = laid_out(speeds, pp, tp, arrangement)
    if expected is None:
        assert found is None
        return
    assert ((found[:, :, 0] - 100) // tp).tolist() == expected
    assert (found == found[:, :, :1] + np.arange(tp)).all()
