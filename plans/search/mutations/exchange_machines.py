"""Exchange of equally many GPUs of two machines between two groups (extension: single swaps rarely move a machine)."""

from __future__ import annotations

from plans.search.genome import Genome
from plans.search.seeds import Draws
from plans.search.tools import SearchTools


def exchange_machines(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Return the candidate with a block exchanged between two groups, or None with a single group."""
    count = len(genome.grouping)
    if count < 2:
        return None
    a, b = rng.pair(count)
    block_a, block_b = _block(tools, genome.gpus[a], rng), _block(tools, genome.gpus[b], rng)
    size = min(len(block_a), len(block_b))
    pairs: dict[int, int] = {}
    for x, y in zip(block_a[:size], block_b[:size], strict=True):
        pairs[x], pairs[y] = y, x
    return genome.exchanged(pairs)


def _block(tools: SearchTools, gpus: tuple[int, ...], rng: Draws) -> list[int]:
    """Return the group's GPUs on the machine of one of its GPUs, drawn at random."""
    machine_of = tools.problem.machine_of
    machine = machine_of[gpus[rng.below(len(gpus))]]
    return [gpu for gpu in gpus if machine_of[gpu] == machine]
