"""An order of the machines in which neighbours are close: blocks of it make good groups, stages and replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plans.spec.cluster import ClusterView

#: Bytes of the transfer that measures closeness: an activation of a 2,048-token sample at hidden size 4,096.
REFERENCE_BYTES = 2.0 * 2048 * 4096
#: Distance over a forbidden link, longer than any other.
FORBIDDEN_S = 1e9


class MachineOrder:
    """Ranks and distances of machines, computed once per cluster."""

    def __init__(self, view: ClusterView) -> None:
        """Keep the view; everything else is computed on first use."""
        self.view = view

    @cached_property
    def distance_s(self) -> NDArray[np.float64]:
        """Seconds of the reference transfer by machine [M, M]; infinite where forbidden."""
        return self.view.machine_latency_s + REFERENCE_BYTES * self.view.machine_s_per_byte

    @cached_property
    def reach_s(self) -> list[list[float]]:
        """`distance_s` as lists, forbidden links as very long ones."""
        found: list[list[float]] = np.where(np.isfinite(self.distance_s), self.distance_s, FORBIDDEN_S).tolist()
        return found

    @cached_property
    def compute(self) -> NDArray[np.float64]:
        """FLOP per second of one GPU, by machine [M]."""
        return self._of_machine(self.view.compute_flop_per_s)

    @cached_property
    def hbm(self) -> NDArray[np.float64]:
        """HBM bytes per second of one GPU, by machine [M]."""
        return self._of_machine(self.view.hbm_bytes_per_s)

    @cached_property
    def memory(self) -> NDArray[np.float64]:
        """Memory bytes of one GPU, by machine [M]."""
        return self._of_machine(self.view.memory_bytes)

    @cached_property
    def chain_rank(self) -> tuple[int, ...]:
        """Rank of each machine on a nearest-neighbour chain that starts at the strongest machine [M].

        Among equally near machines the one of the same GPU type, then the strongest, then the first comes next.
        """
        count = len(self.view.machine_names)
        strength = self.compute * self._gpus_per_machine
        left = set(range(count))
        current = max(left, key=lambda m: (strength[m], -m))
        rank = [0] * count
        for position in range(count):
            rank[current] = position
            left.discard(current)
            if left:
                here, kind = current, self.compute[current]
                current = min(left, key=lambda m: (self.distance_s[here, m], self.compute[m] != kind, -strength[m], m))
        return tuple(rank)

    @cached_property
    def region_chain_rank(self) -> tuple[int, ...]:
        """Rank of each region: the order in which the chain first enters it [R]."""
        region = self.view.region_of_machine
        first = [
            min(self.chain_rank[m] for m in np.nonzero(region == r)[0]) for r in range(len(self.view.region_names))
        ]
        order = sorted(range(len(first)), key=lambda r: first[r])
        return tuple(order.index(r) for r in range(len(first)))

    @cached_property
    def near_rank(self) -> tuple[int, ...]:
        """Rank of each machine with near ones side by side: by region, strong types first, then the chain [M]."""
        return self._ranked(lambda machine: (self._region_rank(machine), -self.compute[machine]))

    @cached_property
    def type_rank(self) -> tuple[int, ...]:
        """Rank of each machine with GPUs of one type side by side, the strongest first, then by region [M]."""
        return self._ranked(lambda machine: (-self.compute[machine], self._region_rank(machine)))

    def _region_rank(self, machine: int) -> int:
        return self.region_chain_rank[int(self.view.region_of_machine[machine])]

    def _ranked(self, key: Callable[[int], tuple[float, float]]) -> tuple[int, ...]:
        """Return the rank of each machine by a key, and by the chain where keys are equal [M]."""
        chain, rank = self.chain_rank, [0] * len(self.view.machine_names)
        for place, machine in enumerate(sorted(range(len(rank)), key=lambda machine: (*key(machine), chain[machine]))):
            rank[machine] = place
        return tuple(rank)

    @cached_property
    def twins(self) -> tuple[tuple[int, ...], ...]:
        """Machines that may change places without changing any price: same GPUs, same links to all others."""
        view, classes = self.view, list[list[int]]()
        for machine in range(len(view.machine_names)):
            home = next((members for members in classes if self._are_alike(members[0], machine)), None)
            if home is None:
                classes.append([machine])
            else:
                home.append(machine)
        return tuple(tuple(members) for members in classes)

    def _are_alike(self, a: int, b: int) -> bool:
        view = self.view
        if self._kind_of(a) != self._kind_of(b):
            return False
        others = np.ones(len(view.machine_names), dtype=bool)
        others[[a, b]] = False
        for matrix in (view.machine_latency_s, view.machine_s_per_byte):
            if matrix[a, a] != matrix[b, b] or matrix[a, b] != matrix[b, a]:
                return False
            if not (np.array_equal(matrix[a, others], matrix[b, others])
                    and np.array_equal(matrix[others, a], matrix[others, b])):  # fmt: skip
                return False
        return True

    def _kind_of(self, machine: int) -> tuple[object, ...]:
        view = self.view
        first = int(np.searchsorted(view.machine_of, machine))
        return (
            int(self._gpus_per_machine[machine]), int(view.region_of_machine[machine]),
            int(view.zone_of_machine[machine]), int(view.type_of[first]), float(view.memory_bytes[first]),
            float(view.reserve_bytes[first]),
        )  # fmt: skip

    @cached_property
    def _gpus_per_machine(self) -> NDArray[np.float64]:
        return np.bincount(self.view.machine_of, minlength=len(self.view.machine_names)).astype(np.float64)

    def _of_machine(self, per_gpu: NDArray[np.float64]) -> NDArray[np.float64]:
        first = np.searchsorted(self.view.machine_of, np.arange(len(self.view.machine_names)))
        return per_gpu[first]
