"""Where one training engine stands in a gang: engines on several machines whose ranks form one process group."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GangPlace(BaseModel):
    """What an engine must know to meet the others.

    There is no secret in it: the network between the machines is trusted, as gloo and NCCL trust it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    token: str = Field(min_length=1)
    """Name of this gang, another one for every epoch; an engine with another token is refused."""
    machines: tuple[str, ...] = Field(min_length=2)
    """Machines in the plan's order. The first one leads: it hosts the store at which all ranks meet."""
    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each machine, in the order of its devices; rank r has the r-th device of the plan."""
    host: str = Field(min_length=1)
    """Address of the first machine."""
    port: int = Field(ge=1, le=65535)
    """Port of its store."""
    address: str = Field(min_length=1)
    """Address of this engine's machine; it talks to the others over the network interface that has it."""

    def ranks_of(self, machine: str) -> tuple[int, ...]:
        """Return the ranks of a machine."""
        return self.ranks[self.machines.index(machine)]

    @property
    def num_ranks(self) -> int:
        """Ranks of all machines."""
        return sum(len(ranks) for ranks in self.ranks)
