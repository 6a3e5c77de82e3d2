"""Which rows go to which rank and into which micro-batch. Pure: indices and lengths in, indices out.

The order of rows inside an optimizer step changes the result only by rounding, since losses are divided by counts over
the whole step; so rows are sorted by length, which keeps padding small, and rows of a prompt stay together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def split_over_ranks(row_indices: Sequence[int], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal rows out so that the ranks' numbers of rows differ by at most one and their lengths are alike.

    Args:
        row_indices: Rows of one optimizer step.
        lengths: Tokens of every row, by row index.
        num_ranks: Number of ranks; those beyond the number of rows get none.

    Returns:
        Row indices of each rank, longest first. [num_ranks][rows]
    """
    ordered = _longest_first(row_indices, lengths)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for place, row in enumerate(ordered):
        lap, seat = divmod(place, num_ranks)
        # Back and forth, so that rank 0 doesn't get the longest row of every lap.
        shares[seat if lap % 2 == 0 else num_ranks - 1 - seat].append(row)
    return shares


def split_by_shares(row_indices: Sequence[int], lengths: Sequence[int], shares: Sequence[int]) -> list[list[int]]:
    """Deal rows out in proportion to shares, longer rows first to whom they delay least.

    Replicas whose share is larger are the faster ones. Numbers of rows are proportional to the shares, rounded by
    largest remainder; within them each row, longest first, goes where tokens divided by share stay lowest (longest
    processing time first on related machines, hetrl.md 10).

    Args:
        row_indices: Rows of one optimizer step.
        lengths: Tokens of every row, by row index.
        shares: Samples of each replica in the plan; all at least 1.

    Returns:
        Row indices of each replica, longest first. [len(shares)][rows]
    """
    room = _proportional(len(row_indices), shares)
    loads = [0] * len(shares)
    parts: list[list[int]] = [[] for _ in shares]
    for row in _longest_first(row_indices, lengths):
        with_room = (replica for replica in range(len(shares)) if len(parts[replica]) < room[replica])
        replica = min(with_room, key=lambda place: ((loads[place] + lengths[row]) / shares[place], place))
        parts[replica].append(row)
        loads[replica] += lengths[row]
    return parts


def _proportional(total: int, shares: Sequence[int]) -> list[int]:
    """Whole numbers proportional to shares, summing to `total`; rounded by largest remainder, earlier ones first."""
    whole = sum(shares)
    counts = [total * share // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda place: (-(total * shares[place] % whole), place))
    for place in by_remainder[: total - sum(counts)]:
        counts[place] += 1
    return counts


def pack_micro_batches(
    row_indices: Sequence[int], lengths: Sequence[int], max_padded_tokens: int, prompts: Sequence[Hashable]
) -> list[list[int]]:
    """Cut rows into micro-batches of at most `max_padded_tokens` padded tokens, rows of one prompt side by side.

    Args:
        row_indices: Rows of one rank in one optimizer step.
        lengths: Tokens of every row, by row index.
        max_padded_tokens: Rows times longest row, at most; a single row may exceed it.
        prompts: Prompt of every row, by row index; rows of equal prompts share its computation.

    Returns:
        Row indices of each micro-batch, prompts with the longest rows first; so the first micro-batch shows whether
        memory suffices.
    """
    by_prompt: dict[Hashable, list[int]] = {}
    for row in _longest_first(row_indices, lengths):
        by_prompt.setdefault(prompts[row], []).append(row)
    micro_batches: list[list[int]] = []
    width = 0
    for row in (row for rows in by_prompt.values() for row in rows):
        width = max(width, lengths[row])
        if micro_batches and (len(micro_batches[-1]) + 1) * width <= max_padded_tokens:
            micro_batches[-1].append(row)
        else:
            micro_batches.append([row])
            width = lengths[row]
    return micro_batches


def _longest_first(row_indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(row_indices, key=lambda row: (-lengths[row], row))
