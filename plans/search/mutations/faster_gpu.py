"""TFLOPS-aware mutation (HetRL section 4.3): a training group gives up a slow GPU for a faster one from outside.

The paper replaces the GPU; here it is an exchange, so that group sizes stay fixed (reconstruction). The GPU to
give up is drawn in proportion to 1 / TFLOPS, its replacement among the strictly faster GPUs of groups without training.
"""

from __future__ import annotations

from plans.search.genome import Genome
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.workflow import TaskKind


def faster_gpu(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Return the candidate with one slow training GPU exchanged, or None where no faster GPU is free for it."""
    trains = [any(task.kind is TaskKind.TRAINING for task in tasks) for tasks in genome.grouping]
    donors = [gpu for gpus, busy in zip(genome.gpus, trains, strict=True) if not busy for gpu in gpus]
    members = [gpu for gpus, busy in zip(genome.gpus, trains, strict=True) if busy for gpu in gpus]
    if not donors or not members:
        return None
    speed = tools.problem.compute_flop_per_s
    slow = rng.weighted(members, [1.0 / speed[gpu] for gpu in members])
    faster = [gpu for gpu in donors if speed[gpu] > speed[slow]]
    if not faster:
        return None
    fast = faster[rng.below(len(faster))]
    return genome.exchanged({slow: fast, fast: slow})
