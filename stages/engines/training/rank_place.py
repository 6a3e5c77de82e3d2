"""Which rank a process is."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank this process is, and where the ranks meet; plain values, so that it can be sent to a child."""

    rank: int = 0
    """The first rank of a machine is the process of the engine there."""
    num_ranks: int = 1
    """Number of ranks on all machines."""
    host: str = LOOPBACK
    """Address of the ranks' store, on the machine of rank 0."""
    port: int = 0
    """Its port; 0 with one rank."""
    address: str = LOOPBACK
    """Address of this machine; ranks talk to each other over the interface that has it."""
    machines: tuple[tuple[int, ...], ...] = ()
    """Ranks of each machine, in the order of its devices; empty = all ranks are on this machine."""
    token: str = ""
    """Name of the gang, which its store has too; empty on one machine."""
    timeout_s: float = 1800.0
    """Longest wait for another rank in one collective."""

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks on this machine, in the order of its devices."""
        return next((ranks for ranks in self.machines if self.rank in ranks), tuple(range(self.num_ranks)))

    @property
    def local_rank(self) -> int:
        """Index of this rank's device among those of the machine that the engine sees."""
        return self.local_ranks.index(self.rank)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """First rank of each machine."""
        return tuple(ranks[0] for ranks in self.machines) or (0,)
