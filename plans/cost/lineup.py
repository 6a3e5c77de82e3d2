"""Machines of a placement's stages: all that its times depend on, since GPUs of one machine are alike.

Placements that differ only in which GPUs of a machine they use have equal lineups, and so have most replicas of a
task: what was worked out for one row serves all equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Site = int | tuple[int, ...]
"""Where a stage is: its machine, or the sorted machines of its GPUs when its TP group spans several."""
Row = tuple[Site, ...]
"""Sites of a replica's stages [pp]."""


class Lineup(NamedTuple):
    """Sites of all replicas."""

    rows: tuple[Row, ...]
    """Row of each replica [dp]."""
    machines: list[int]
    """Machine of each tasklet, replica by replica, stage by stage, shard by shard."""
    is_local: bool
    """Whether every TP group lies inside a machine."""
    pp: int
    """Stages per replica."""
    tp: int
    """Shards per stage."""


def lineup_of(machine_of: Sequence[int], gpus: Sequence[int], pp: int, tp: int) -> Lineup:
    """Return the lineup of a placement.

    Args:
        machine_of: machine by GPU [N].
        gpus: GPU of each tasklet, replica by replica, stage by stage, shard by shard [dp * pp * tp].
        pp: stages per replica.
        tp: shards per stage.
    """
    machines = [machine_of[gpu] for gpu in gpus]
    sites: list[Site] = list(machines[::tp])
    is_local = all(machines[shard::tp] == sites for shard in range(1, tp))
    if not is_local:
        sites = [_site(machines[start : start + tp]) for start in range(0, len(machines), tp)]
    return Lineup(tuple(zip(*[iter(sites)] * pp, strict=True)), machines, is_local, pp, tp)


def _site(machines: list[int]) -> Site:
    machines.sort()
    return machines[0] if machines[0] == machines[-1] else tuple(machines)
