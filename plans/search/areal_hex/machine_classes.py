"""Machines that are alike in everything a plan can notice, so that which of them is used changes nothing.

Classes keep the phases small (a split counts GPUs per class) and make the method blind to the names and the order
of equal machines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plans.spec.cluster import ClusterView


@dataclass(frozen=True, slots=True)
class MachineClass:
    """Equal machines: one GPU type, one zone, one size, the same links."""

    machines: tuple[int, ...]
    """Machine indices, ascending."""
    gpu_type: int
    """Index of the GPU type."""
    zone: int
    """Index of the zone."""
    region: int
    """Index of the region."""
    size: int
    """GPUs of each machine."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all its machines."""
        return self.size * len(self.machines)


def machine_classes(view: ClusterView) -> tuple[MachineClass, ...]:
    """Return the classes in the order of their first machines.

    Two machines are equal when type, zone, size and inner link agree and both have the same link to every third
    machine; that is an equivalence, so comparing with one member of each class suffices. O(M * classes * M).
    """
    sizes = np.bincount(view.machine_of, minlength=len(view.machine_names))
    starts = np.concatenate(([0], np.cumsum(sizes)))[:-1]
    types = view.type_of[starts]
    members: list[list[int]] = []
    for machine in range(len(sizes)):
        for group in members:
            if _are_equal(view, sizes, types, group[0], machine):
                group.append(machine)
                break
        else:
            members.append([machine])
    return tuple(
        MachineClass(
            machines=tuple(group),
            gpu_type=int(types[group[0]]),
            zone=int(view.zone_of_machine[group[0]]),
            region=int(view.region_of_machine[group[0]]),
            size=int(sizes[group[0]]),
        )
        for group in members
    )


def _are_equal(view: ClusterView, sizes: np.ndarray, types: np.ndarray, a: int, b: int) -> bool:
    if sizes[a] != sizes[b] or types[a] != types[b] or view.zone_of_machine[a] != view.zone_of_machine[b]:
        return False
    for matrix in (view.machine_latency_s, view.machine_bytes_per_s):
        if matrix[a, a] != matrix[b, b]:
            return False
        differs = matrix[a] != matrix[b]
        differs[[a, b]] = False
        if differs.any():
            return False
    return True
