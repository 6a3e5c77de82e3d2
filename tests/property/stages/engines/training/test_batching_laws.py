from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.engines.training.batching import pack_micro_batches, split_by_shares, split_over_ranks

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 8))
def test_split_over_ranks_gives_every_row_once_and_even_counts(lengths, num_ranks):
    shares = split_over_ranks(range(len(lengths)), lengths, num_ranks)
    assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
    assert len(shares) == num_ranks
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(lengths=LENGTHS, num_ranks=st.integers(1, 8), data=st.data())
def test_split_over_ranks_ignores_the_order_of_rows(lengths, num_ranks, data):
    order = data.draw(st.permutations(range(len(lengths))))
    assert split_over_ranks(order, lengths, num_ranks) == split_over_ranks(range(len(lengths)), lengths, num_ranks)


@given(lengths=LENGTHS, budget=st.integers(1, 1000))
def test_pack_micro_batches_keeps_the_budget_unless_a_row_is_alone(lengths, budget):
    packs = pack_micro_batches(range(len(lengths)), lengths, budget, [row // 4 for row in range(len(lengths))])
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    for pack in packs:
        padded = len(pack) * max(lengths[row] for row in pack)
        assert padded <= budget or len(pack) == 1


@given(lengths=LENGTHS, budget=st.integers(1, 1000))
def test_pack_micro_batches_puts_the_longest_row_first(lengths, budget):
    packs = pack_micro_batches(range(len(lengths)), lengths, budget, [row // 4 for row in range(len(lengths))])
    assert lengths[packs[0][0]] == max(lengths)


@given(lengths=LENGTHS, group=st.integers(1, 8))
def test_pack_micro_batches_keeps_the_rows_of_a_prompt_together(lengths, group):
    prompts = [row % group for row in range(len(lengths))]
    packs = pack_micro_batches(range(len(lengths)), lengths, 10**9, prompts)
    assert len(packs) == 1
    order = [prompts[row] for row in packs[0]]
    assert sum(left != right for left, right in pairwise(order)) == len(set(prompts)) - 1


SHARES = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@settings(deadline=None)
@given(lengths=LENGTHS, shares=SHARES)
def test_split_by_shares_gives_every_row_once_and_counts_in_proportion(lengths, shares):
    parts = split_by_shares(range(len(lengths)), lengths, shares)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - len(lengths) * share / sum(shares)) < 1


@settings(deadline=None)
@given(lengths=LENGTHS, shares=SHARES, data=st.data())
def test_split_by_shares_ignores_the_order_of_rows(lengths, shares, data):
    order = data.draw(st.permutations(range(len(lengths))))
    assert split_by_shares(order, lengths, shares) == split_by_shares(range(len(lengths)), lengths, shares)


def test_split_by_shares_gives_longer_rows_to_the_larger_share():
    # Shares 2 and 1: two rows of three. 90 fits better behind share 2 (45 against 90), then 60 (75 against 60), 30.
    assert split_by_shares([0, 1, 2], [30, 90, 60], [2, 1]) == [[1, 0], [2]]
