"""Constants of a cluster, a job and a model as arrays: what the compiled cost model reads.

T = tasks of the job, in order; M = machines; N = GPUs. GPUs of one machine are alike, so most is by machine. Rows of
`Tables.terms` and `MemoryTables.tasks` are tasks; their columns are numbered here.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
HashArray = NDArray[np.uint64]

# Fields of the tables say how many dimensions they have (`plans.cost.compiled.words`).
FloatVector = Annotated[FloatArray, 1]
FloatMatrix = Annotated[FloatArray, 2]
IntVector = Annotated[IntArray, 1]
IntMatrix = Annotated[IntArray, 2]
HashMatrix = Annotated[HashArray, 2]

#: Columns of `Tables.terms`: the fields of `TaskTerms`; from DECODES on those of `DecodeTerms` (0 for other tasks).
(
    PASSES, LAYER_FLOP, HEAD_FLOP, PADS, TP_COUNT, PP_COUNT, ACTIVATION_BYTES, GRADIENT_LAYER_BYTES,
    GRADIENT_FIRST_BYTES, GRADIENT_LAST_BYTES, UPDATES, SHARES_LINKS, HAS_BUBBLE, TRAINS, NUM_LAYERS,
    DECODES, DECODE_LAYER_BYTES, DECODE_HEAD_BYTES, DECODE_CACHE_BYTES, DECODE_LAYER_FLOP, DECODE_HEAD_FLOP,
    DECODE_KV_HEADS, DECODE_TP_COUNT, DECODE_TOKEN_BYTES, DECODE_GROUPS, DECODE_RESPONSE, NUM_TERMS,
) = range(27)  # fmt: skip

#: Columns of `MemoryTables.tasks`: what `TaskMemory` reads of the task's model and the training settings.
(
    LAYER_PARAMETERS, FIRST_PARAMETERS, LAST_PARAMETERS, ONLY_PARAMETERS, REPLICATED_BYTES, STATE_BYTES,
    SHARES_STATES, IS_TRAINING, IS_GENERATION, ELEMENT_BYTES, TOKENS, HIDDEN, WIDTH, VOCABULARY, LOGIT_BYTES,
    KEEPS_ALL, IS_SEQUENCE_PARALLEL, KV_HEADS, HEAD_DIM, OWNER, SPREADS_ALL, COPY_BYTES, GATHERED_BYTES, NUM_MEMORY,
) = range(24)  # fmt: skip

#: Columns of `Tables.facts`: whole numbers of the job and the model.
(
    LATENCY_PER_STEP, SAMPLES, FANOUT, GENERATION, TRAINING, IS_ASYNC, HAS_ETA, LINE_LAYERS, NUM_FACTS,
) = range(9)  # fmt: skip
DIRECT, SEQUENTIAL, PER_REGION = range(3)

#: Columns of `Tables.numbers`: the other numbers of the job and the model.
(ETA, DELTA_FRACTION, SYNC_FACTOR, EMBEDDING_BYTES, LINE_LAYER_BYTES, LINE_HEAD_BYTES, NUM_NUMBERS) = range(7)

#: Columns of a row of a plan's `shape`: degrees, samples per micro-batch, layer split and group of a task (-1 = none),
#: and, filled in by `place_tasks`, where its GPUs, layers, samples and places (stages of replicas) begin.
DP, PP, TP, MICRO_BATCH, SPLIT, GROUP, GPUS_AT, LAYERS_AT, SAMPLES_AT, PLACES_AT, NUM_SHAPE = range(11)
SPLIT_SPEED, SPLIT_MEMORY, SPLIT_EVEN = range(3)

#: Rings kept; a power of two.
RINGS_KEPT = 1 << 15
#: Rings that one call may ask for.
RINGS_ASKED = 64


class Rings(NamedTuple):
    """Best rings found by search, by hash, and those that were asked for and are not known yet.

    A ring depends on the GPUs per machine and on the order of the links' times for its message; both go into a hash
    of 128 bits, which tells rings apart for all practical purposes (10^10 rings share one with probability 10^-19).
    """

    keys: HashMatrix
    """Hashes [RINGS_KEPT, 2]; 0 = free."""
    edges: FloatMatrix
    """Latency and seconds per byte of the slowest edge [RINGS_KEPT, 2]."""
    asked_keys: HashMatrix
    """Hashes of the unknown rings [RINGS_ASKED, 2]."""
    asked_counts: IntMatrix
    """Their GPUs per machine [RINGS_ASKED, M]."""
    asked_bytes: FloatVector
    """Bytes over their edges [RINGS_ASKED]."""
    num_asked: IntVector
    """How many are unknown [1]; a result is wrong unless it is 0."""


class MemoryTables(NamedTuple):
    """What the memory of a plan depends on, beside the plan."""

    tasks: FloatMatrix
    """Constants by task [T, NUM_MEMORY]."""
    machine_of: IntVector
    """Machine of each GPU [N]."""
    capacity_bytes: FloatVector
    """Bytes that tasklets may use on a GPU of each machine [M]."""
    usable_bytes: FloatVector
    """Bytes that weights and cache of generation may fill together on a GPU of each machine [M]."""
    most_sequences: int
    """Most sequences that may be decoded together."""
    generation: int
    """Row of generation."""


class Tables(NamedTuple):
    """All that the cost of a plan depends on, beside the plan."""

    machine_of: IntVector
    """Machine of each GPU [N]."""
    latency_s: FloatMatrix
    """One-way latency between machines [M, M]; infinite where forbidden, the diagonal inside a machine."""
    s_per_byte: FloatMatrix
    """Seconds per byte between machines [M, M]."""
    link_classes: FloatMatrix
    """Different links: latency and seconds per byte [2, classes]."""
    region: IntVector
    """Region of each machine [M]."""
    flop_per_s: FloatMatrix
    """Effective FLOP/s by task and machine [T, M]."""
    hbm_bytes_per_s: FloatMatrix
    """Effective HBM bytes/s by task and machine [T, M]."""
    overhead_s: FloatVector
    """Seconds per layer and decode step that are not bandwidth [M]."""
    terms: FloatMatrix
    """Constants of the times [T, NUM_TERMS]."""
    memory: MemoryTables
    """Constants of the memory."""
    tails: FloatVector
    """Decode steps of the last wave's tail, by decode batch."""
    facts: IntVector
    """Whole numbers [NUM_FACTS]."""
    numbers: FloatVector
    """Other numbers [NUM_NUMBERS]."""
    rings: Rings
    """Rings that need a search."""
