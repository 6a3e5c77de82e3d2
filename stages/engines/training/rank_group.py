"""Sums and maxima over the ranks of one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist


class RankGroup:
    """Ranks that reduce together, seen from one of them. With one rank every reduction is the identity."""

    def __init__(
        self, rank: int, num_ranks: int, device: torch.device, *, is_counted: bool = True,
        first_ranks: Sequence[int] = (0,),
    ) -> None:  # fmt: skip
        """Describe the group; torch's default process group has its ranks.

        Args:
            rank: This rank.
            num_ranks: Ranks of the group.
            device: Where tensors of a reduction are.
            is_counted: Whether what this rank has counts in sums and maxima. Of several ranks that compute the same
                rows together (tensor and pipeline parallelism) just one does.
            first_ranks: First rank of each machine; rank 0 is the first one's.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.is_counted = is_counted
        self.first_ranks = tuple(first_ranks)
        self.is_first_here = rank in self.first_ranks

    def sum(self, values: Tensor) -> Tensor:
        """Sum over counted ranks, elementwise, in place."""
        if not self.is_counted:
            values.zero_()
        if self.num_ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Sums over counted ranks."""
        return [float(value) for value in self.sum(self._float64(values)).tolist()]

    def sum_mapping(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over counted ranks by name; all ranks have the same names."""
        names = sorted(values)
        return dict(zip(names, self.sum_floats([values[name] for name in names]), strict=True))

    def max_floats(self, values: Sequence[float]) -> list[float]:
        """Maxima over counted ranks."""
        tensor = self._float64(values)
        if not self.is_counted:
            tensor.fill_(-torch.inf)
        if self.num_ranks > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.num_ranks > 1:
            self.sum_floats([1.0])

    def _float64(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64, device=self.device)
