"""Machines of a placement's stages: all that its times depend on, since GPUs of one machine are alike.

Placements that differ only in which GPUs of a machine they use have equal lineups, and so have most replicas of a
task: what was worked out for one row serves all equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plans.cost.cache import BoundedCache, entries_for

Site = int | tuple[int, ...]
"""Where a stage is: its machine, or the sorted machines of its GPUs when its TP group spans several."""
Row = tuple[Site, ...]
"""Sites of a replica's stages [pp]."""


@dataclass(frozen=True, eq=False, slots=True)
class Lineup:
    """Sites of all replicas; compared by identity, see `Lineups`."""

    rows: tuple[Row, ...]
    """Row of each replica [dp]."""
    distinct: tuple[Row, ...]
    """Rows without repetition, in order."""
    machines: tuple[int, ...]
    """Machine of each tasklet, replica by replica, stage by stage, shard by shard."""
    is_local: bool
    """Whether every TP group lies inside a machine."""
    pp: int
    """Stages per replica."""
    tp: int
    """Shards per stage."""


class Lineups:
    """Lineups of one cluster. Placements on the same machines get the same object, so that it can be their key."""

    def __init__(self, machine_of: Sequence[int]) -> None:
        """Keep the machine of each GPU [N]."""
        self._machine_of = list(machine_of)
        self._kept: BoundedCache[tuple[tuple[int, ...], int, int], Lineup] = BoundedCache(entries_for(len(machine_of)))

    def of(self, gpus: Sequence[int], pp: int, tp: int) -> Lineup:
        """Return the lineup of a placement.

        Args:
            gpus: GPU of each tasklet, replica by replica, stage by stage, shard by shard [dp * pp * tp].
            pp: stages per replica.
            tp: shards per stage.
        """
        machine_of = self._machine_of
        machines = tuple([machine_of[gpu] for gpu in gpus])
        key = (machines, pp, tp)
        found = self._kept.get(key)
        if found is None:
            found = _lineup(machines, pp, tp)
            self._kept.put(key, found)
        return found


def _lineup(machines: tuple[int, ...], pp: int, tp: int) -> Lineup:
    sites: list[Site] = list(machines[::tp])
    is_local = all(list(machines[shard::tp]) == sites for shard in range(1, tp))
    if not is_local:
        sites = [_site(sorted(machines[start : start + tp])) for start in range(0, len(machines), tp)]
    rows = tuple(zip(*[iter(sites)] * pp, strict=True))
    return Lineup(rows, tuple(dict.fromkeys(rows)), machines, is_local, pp, tp)


def _site(machines: list[int]) -> Site:
    """Return the site of a TP group, given its machines, sorted."""
    return machines[0] if machines[0] == machines[-1] else tuple(machines)
