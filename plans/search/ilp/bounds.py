"""Lower bounds on the seconds of a task over a class of placements, whatever its layers, samples and arrangement.

Argument. Let a task with L layers and B samples run on stages (i, j) of replicas i with c_ij seconds per sample and
layer. Stage (i, j) takes at least s_i * l_j * c_ij, so a task of T seconds has s_i * l_j <= T / c_ij; summing over
all stages, B * L <= T * sum 1 / c_ij. A stage of `tp` GPUs is as slow as its slowest GPU, so 1 / c_ij is at most the
mean over its GPUs of 1 / c_m, c_m being the cost of a stage of GPUs like that one with the fastest link that leaves
its machine (or stays in it). Hence T >= B * L / sum over GPUs of (1 / tp) / c_m: the fluid bound. Head FLOPs of the
last stage act as extra layers, at least min over machines of head / c_m of them. Added to it: gradient rings that
must leave a machine do, at the fastest link that leaves any. A pipeline's fill is u times the stages but the first,
and the first takes at most M, the slowest one's seconds per sample: a replica of s samples takes at least
(s - u) M + u * L * min c, hence T >= u * L * min c + (B - u * dp) / sum over replicas of 1 / M.

A second bound minds that layers are whole. A replica with k_m stages on machine m takes at least t(k) seconds per
sample: the least t at which sum_m k_m * floor((t - p) / c_m) reaches L, with p the least transfer to a next stage and
the head on the stage that suits it best. A stage over several machines counts for its slowest one. The speeds 1 /
t(k) of the replicas add up to at least B / T, and for any prices y_m >= 0 of GPUs to at most sum_m y_m * GPUs of m /
tp + dp * max_k (1 / t(k) - y . k). Prices 1 / (c_m L) make the first part the fluid speed, the second the loss by
rounding. A third bound is that some stage holds at least ceil(L / pp) layers and some replica ceil(B / dp) samples.

Decoding costs A + D / b per sample and layer for b sequences at a time. GPU g of a replica with batch b holds b * l_j
* cache bytes; with b_g = b the mean over a replica's GPUs of its cache is b * (L / pp) * cache. Whatever the
batches, sum over GPUs of b_g <= C where C * (L / pp) * cache bytes are available in all, and the most that speeds
sum 1 / c_m(b_g) can add up to under that constraint is bounded by its Lagrangian dual for any multiplier. The
bound is the least over a grid of multipliers, valid without being exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from plans.cost.evaluator import PlanEvaluator
from plans.cost.terms import DecodeTerms
from plans.memory import TaskMemory
from plans.search.brute_force_grids import Degrees
from plans.search.ilp.cells import CellBook
from plans.search.ilp.replicas import MixTable, speeds_of
from plans.search.ilp.splits import shared_split_sums
from plans.workflow import RlTask, TaskKind

FloatArray = NDArray[np.float64]

#: Multipliers of the dual; more of them only sharpen the bound.
MULTIPLIERS = 160
#: Decode batches at which the replicas of generation are looked at: all up to the first, then in steps of the second.
EACH_BATCH, BATCH_STEP = 16, 1.08
#: Multipliers of the dual over replicas.
REPLICA_MULTIPLIERS = 40
#: Subtracted, relative, from every bound: floating-point noise must not turn a bound into a false one.
SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Bound on generation as a function of the sequences decoded at a time."""

    work: FloatArray
    """Layers times samples of each variant [2]: with the head's reads (memory side), without (either side)."""
    speed: FloatArray
    """Dual speeds per variant and multiplier [2, K]."""
    multipliers: FloatArray
    """Multipliers [K]."""
    least: float
    """Seconds from the integrality bound, for any batch."""
    replica_work: float = 0.0
    """Samples; 0 where the replicas were not looked at."""
    replica_speed: FloatArray = field(default_factory=lambda: np.ones(1))
    """Dual sums of speeds of replicas [L]."""
    replica_multipliers: FloatArray = field(default_factory=lambda: np.zeros(1))
    """Their multipliers [L]."""

    def seconds(self, concurrency: float) -> float:
        """Return a lower bound for at most so many sequences, summed over GPUs."""
        if math.isinf(self.least):
            return math.inf
        fastest = (self.speed + self.multipliers * concurrency).min(axis=1)
        replicas = float((self.replica_speed + self.replica_multipliers * concurrency).min())
        if replicas <= 0.0:
            return math.inf  # no replicas decode so few sequences
        flow = max(float((self.work / fastest).max()), self.replica_work / replicas)
        return max(self.least, flow * (1.0 - SLACK))


class TaskBounds:
    """Bounds for one task on one cluster."""

    def __init__(self, evaluator: PlanEvaluator, task: RlTask) -> None:
        """Read the constants of the task per machine."""
        job, view = evaluator.job, evaluator.view
        self.task, self.terms, self.links = task, evaluator.terms[task], evaluator.links
        self.samples = job.num_samples
        self.mbs = job.training.micro_batch_size if task.kind is TaskKind.TRAINING else 1
        self.memory = TaskMemory(job, task)
        first = [int(np.flatnonzero(view.machine_of == m)[0]) for m in range(len(view.machine_names))]
        self.flop_per_s = self.terms.compute_flop_per_s[first]
        self.hbm_bytes_per_s = self.terms.hbm_bytes_per_s[first]
        self.memory_bytes = view.memory_bytes[first]
        usable = np.minimum(job.generation.memory_fraction * view.memory_bytes, view.memory_bytes - view.reserve_bytes)
        self.usable_bytes = usable[first]
        self.capacity_bytes = (view.memory_bytes - view.reserve_bytes)[first]
        self.cap = job.generation.max_num_seqs
        sizes = np.bincount(view.machine_of, minlength=len(first)).tolist()
        room = self.usable_bytes if task.kind is TaskKind.GENERATION else self.capacity_bytes
        self.cells = CellBook(
            self.terms,
            self.links,
            self.memory,
            gpus=sizes,
            first_gpu=first,
            room_bytes=room,
            micro_batch_size=self.mbs,
        )
        self._sizes: list[int] = sizes
        self._mixes: dict[tuple[int, int], MixTable] = {}
        self._sums: dict[tuple[int, int, int], FloatArray] = {}
        self._shared: dict[tuple[int, int, int], FloatArray] = {}
        self._prices: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        self._tables: dict[tuple[int, bool, tuple[float, ...]], _DecodeTable] = {}
        self.overhead_s = (
            self.terms.decode.layer_overhead_s[first] if self.terms.decode is not None else np.zeros(len(first))
        )

    # -- links ------------------------------------------------------------------------------------------------

    def edges(self, num_bytes: float, ring: int) -> FloatArray:
        """Return seconds over an edge of a ring of `ring` GPUs by machine [M, M]."""
        steps = 2 * (ring - 1) if self.links.latency_per_step else 1
        return self.links.edge_matrix(range(len(self.flop_per_s)), num_bytes, steps)

    @staticmethod
    def nearest(edges: FloatArray, counts: FloatArray) -> FloatArray:
        """Return the fastest edge that a GPU of each machine can have [M], given the GPUs in use per machine."""
        open_edges = np.where(counts[None, :] > 0, edges, np.inf)
        diagonal = np.where(counts >= 2, edges.diagonal(), np.inf)
        open_edges[np.diag_indices(len(edges))] = diagonal
        nearest: FloatArray = open_edges.min(axis=1)
        return nearest

    # -- tasks that don't decode ------------------------------------------------------------------------------

    def seconds(self, degrees: Degrees, counts: Sequence[int]) -> float:
        """Return a lower bound on the seconds of a placement on exactly so many GPUs of each machine."""
        used = np.asarray(counts, dtype=np.float64)
        cost = self._layer_cost(degrees, used)
        on = used > 0
        if not np.isfinite(cost[on]).all():
            return math.inf  # a GPU in use whose TP ring needs a forbidden link
        layers = self.terms.num_layers + self._head_layers(degrees.tp, cost, on)
        fluid = self.samples * layers * degrees.tp / float((used[on] / cost[on]).sum())
        best = float(cost[on].min())
        flow = max(fluid, self._replicas_s(degrees, counts))
        if math.isinf(flow):
            return math.inf
        seconds = self._with_bubble_s(degrees, flow, best)
        return (seconds + self._gradient_s(degrees, used)) * (1.0 - SLACK)

    def _with_bubble_s(self, degrees: Degrees, flow_s: float, best: float) -> float:
        """Return the bound with pipeline fill, from B over a bound of the sum of the replicas' speeds."""
        least = self._least_s(degrees, best)
        if not self.terms.has_bubble or degrees.pp == 1:
            return max(flow_s, least)
        # A micro-batch may be cut short by the last samples, unless it is padded.
        fill = self.terms.updates * (self.mbs if self.terms.pads_micro_batches else 1)
        kept = max(0.0, 1.0 - fill * degrees.dp / self.samples)
        filled = flow_s * kept + fill * self.terms.num_layers * best
        return max(filled, max(flow_s, least) + fill * (degrees.pp - 1) * best)

    def _least_s(self, degrees: Degrees, best: float) -> float:
        """Return the bound by the replica with most samples and its stage with most layers."""
        return math.ceil(self.samples / degrees.dp) * math.ceil(self.terms.num_layers / degrees.pp) * best

    # -- whole layers, replicas and memory -----------------------------------------------------------------------

    def mix_table(self, degrees: Degrees) -> MixTable | None:
        """Return the mixes of machines of a replica; None where they are too many."""
        if not MixTable.is_small(degrees.pp, degrees.tp, self._sizes):
            return None
        key = (degrees.pp, degrees.tp)
        table = self._mixes.get(key)
        if table is None:
            table = self._mixes[key] = MixTable(degrees.pp, degrees.tp, self._sizes)
        return table

    def _replicas_s(self, degrees: Degrees, counts: Sequence[int]) -> float:
        """Return the bound by replicas; infinite where no placement on these GPUs holds the task, 0 = not known."""
        table = self.mix_table(degrees)
        if table is None:
            return 0.0
        key = (degrees.dp, degrees.pp, degrees.tp)
        sums = self._sums.get(key)
        if sums is None:
            seconds = self.cells.plain(degrees.pp, degrees.tp, degrees.dp).mix_s(table.mixes, self.terms.num_layers)
            sums = self._sums[key] = table.sums(speeds_of(seconds[0]), degrees.dp)
        speed = float(table.at(sums, counts))
        shared = self._shared.get(key)
        if shared is not None:
            speed = min(speed, float(table.at(shared, counts)))
        return self.samples / speed if speed > 0.0 else math.inf

    def share_split(self, degrees: Degrees, cutoff_s: float) -> bool:
        """Make the bounds of these degrees mind that replicas share a layer split; tell whether that was done.

        Seconds from `cutoff_s` on are of no interest: there the bound may stop. Not for generation.
        """
        table = self.mix_table(degrees)
        key = (degrees.dp, degrees.pp, degrees.tp)
        if table is None or key in self._shared or min(degrees.dp, degrees.pp) == 1 or not math.isfinite(cutoff_s):
            return False
        cells = self.cells.plain(degrees.pp, degrees.tp, degrees.dp)
        sums = shared_split_sums(cells, table, degrees.dp, self.terms.num_layers, self.samples / cutoff_s)
        if sums is not None:
            self._shared[key] = sums
        return sums is not None

    def _layer_cost(self, degrees: Degrees, used: FloatArray) -> FloatArray:
        """Return seconds per sample and layer of a stage, by machine [M]."""
        tp = degrees.tp
        cost: FloatArray = self.terms.passes * self.terms.layer_flop / (self.flop_per_s * tp)
        if tp > 1:
            ring = self.nearest(self.edges(self.terms.tp_bytes(self.mbs, tp), tp), used)
            cost = cost + self.terms.tp_count / self.mbs * ring
        return cost

    def _head_layers(self, tp: int, cost: FloatArray, on: NDArray[np.bool_]) -> float:
        head = self.terms.passes * self.terms.head_flop / (self.flop_per_s * tp)
        return float((head[on] / cost[on]).min())

    def _gradient_s(self, degrees: Degrees, used: FloatArray) -> float:
        """Return a bound on the gradient all-reduce: the stage with most layers, over the fastest links."""
        if not self.terms.is_training or degrees.dp == 1:
            return 0.0
        layers = math.ceil(self.terms.num_layers / degrees.pp)
        num_bytes = self.terms.dp_bytes(
            self.terms.stage_gradient_bytes(layers, is_first=False, is_last=False), degrees.dp, degrees.tp
        )
        edges = self.edges(num_bytes, degrees.dp)
        if used.max() < degrees.dp:  # no machine holds a whole ring, so some edge leaves a machine
            others = edges + np.diag(np.full(len(edges), np.inf))
            near = self.nearest(others, used)
        else:
            near = self.nearest(edges, used)
        return self.terms.updates * float(near[used > 0].min())

    # -- generation -------------------------------------------------------------------------------------------

    def decode_curve(self, degrees: Degrees, counts: Sequence[int]) -> DecodeCurve:
        """Return the bound on generation on exactly so many GPUs of each machine."""
        used = np.asarray(counts, dtype=np.float64)
        on = used > 0
        table = self._decode_table(degrees, used)
        multipliers, best = table.multipliers, table.best[:, on]
        speed = np.einsum("m,vmk->vk", used[on] / degrees.tp, best)
        work = self.samples * (self.terms.num_layers + table.extra_layers(on))
        if not table.fastest[on].all():
            return DecodeCurve(work, speed, multipliers, math.inf)  # as above
        fastest = float(table.fastest[on].max())
        least = self._least_s(degrees, 1.0 / fastest)
        # The dual is written for the sum of b over GPUs; speeds are per stage, hence / tp above.
        curve = DecodeCurve(work, speed, multipliers / degrees.tp, least * (1.0 - SLACK))
        return self._with_replicas(curve, degrees, counts)

    def _with_replicas(self, curve: DecodeCurve, degrees: Degrees, counts: Sequence[int]) -> DecodeCurve:
        """Return the curve with the dual over replicas, where their mixes are few enough."""
        table = self.mix_table(degrees)
        if table is None:
            return curve
        multipliers, prices = self._replica_prices(degrees, table)
        key = (degrees.dp, degrees.pp, degrees.tp)
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = table.sums(prices, degrees.dp)
        speed = table.at(sums, counts)
        if not np.isfinite(speed).all():
            return replace(curve, least=math.inf)  # no replicas on these GPUs hold the model and one sequence
        # A replica's batch counts once for each of its GPUs in the sequences summed over GPUs.
        per_gpu = multipliers / (degrees.pp * degrees.tp)
        return replace(curve, replica_work=float(self.samples), replica_speed=speed, replica_multipliers=per_gpu)

    def _replica_prices(self, degrees: Degrees, table: MixTable) -> tuple[FloatArray, FloatArray]:
        """Return multipliers [L] and the most of speed minus multiplier times batch, by mix [K, L]."""
        key = (degrees.pp, degrees.tp)
        found = self._prices.get(key)
        if found is not None:
            return found
        decode = self.terms.decode
        if decode is None:
            raise ValueError(f"{self.task.value} does not decode")
        batches = _batches(min(self.cap, self.samples))
        # A batch between two of the grid is no faster than the upper one, and holds and counts more than the lower one.
        above = np.concatenate(([1.0], batches[:-1] + 1.0))
        seconds = self.cells.decoding(decode, *key, batches, above).mix_s(table.mixes, self.terms.num_layers)
        speeds = speeds_of(seconds)
        steepest = float((speeds[0][np.isfinite(speeds[0])]).max(initial=0.0))
        multipliers = np.concatenate(([0.0], np.geomspace(1e-5, 1.0, REPLICA_MULTIPLIERS))) * steepest
        prices = (speeds[:, :, None] - multipliers * above[:, None, None]).max(axis=0)
        self._prices[key] = multipliers, prices
        return multipliers, prices

    def cache_per_gpu(self, degrees: Degrees) -> float:
        """Return cache bytes that one sequence takes on a GPU of its replica, on average."""
        return self.memory.cache_bytes(self.terms.num_layers, degrees.tp) / degrees.pp

    def most_batch(self, degrees: Degrees) -> FloatArray:
        """Return the most sequences that a GPU of each machine can decode at a time [M], other tasks left out.

        A GPU that decodes holds at least the bytes of the weights: its own copy, or those of training in place.
        """
        cap = np.full(len(self.flop_per_s), float(self.cap))
        if degrees.pp > 1:
            return cap  # a stage may have few layers, so the GPU's own memory sets no limit
        weights = self.memory.model_bytes(
            self.terms.num_layers, is_first=True, is_last=True, tp=degrees.tp, dp=degrees.dp
        )
        room = np.floor((self.usable_bytes - weights) / self.cache_per_gpu(degrees) + SLACK)
        limit: FloatArray = np.minimum(cap, np.maximum(room, 1.0))
        return limit

    def _decode_table(self, degrees: Degrees, used: FloatArray) -> _DecodeTable:
        decode = self.terms.decode
        if decode is None:
            raise ValueError(f"{self.task.value} does not decode")
        # Beside the degrees only whether a machine has no, one or more GPUs in use decides the costs.
        key = (degrees.tp, degrees.pp > 1, tuple(np.minimum(used, 2.0)))
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._make_table(decode, degrees, used)
        return table

    def _make_table(self, decode: DecodeTerms, degrees: Degrees, used: FloatArray) -> _DecodeTable:
        tp, response = degrees.tp, decode.lengths.response
        flat = self._layer_cost(degrees, used)
        if decode.tp_count and tp > 1:
            num_bytes = decode.token_bytes * (2.0 * (tp - 1) / tp)
            # Its latency, charged per step, shrinks with the batch: only the bytes are counted.
            allowed = np.isfinite(self.links.latency_s)
            ring = self.nearest(np.where(allowed, num_bytes * self.links.s_per_byte, np.inf), used)
            flat = flat + response * decode.tp_count * ring
        overhead = response * self.overhead_s
        weights = response * decode.layer_bytes / tp / self.hbm_bytes_per_s + overhead
        read = flat + response * decode.cache_bytes / min(tp, decode.kv_heads) / self.hbm_bytes_per_s
        compute = flat + response * decode.layer_flop / tp / self.flop_per_s
        most = self.most_batch(degrees)
        batches = np.arange(1.0, float(most.max()) + 1.0)  # decode batches are whole numbers
        memory_side = batches / (read[:, None] * batches + weights[:, None])
        compute_side = batches / (compute[:, None] * batches + overhead[:, None])
        speeds = np.stack([memory_side, np.minimum(memory_side, compute_side)])
        speeds = np.where(batches <= most[:, None], speeds, 0.0)
        steepest = float(np.max(memory_side[:, 0][used > 0]))
        multipliers = np.concatenate(([0.0], np.geomspace(1e-6, 1.0, MULTIPLIERS))) * steepest
        best = np.stack([(speeds - value * batches).max(axis=2) for value in multipliers], axis=2)
        head_s = response * decode.head_bytes / tp / self.hbm_bytes_per_s
        return _DecodeTable(multipliers, best, speeds[1].max(axis=1), head_s / (weights + read * most))


@dataclass(frozen=True, slots=True)
class _DecodeTable:
    """Dual speeds of decoding per variant, machine and multiplier."""

    multipliers: FloatArray
    """Multipliers [K]."""
    best: FloatArray
    """Largest speed minus multiplier * batch over the batches [2, M, K]."""
    fastest: FloatArray
    """Largest speed over the batches [M]."""
    head: FloatArray
    """Reads of the head, counted in layers, at least [M]."""

    def extra_layers(self, on: NDArray[np.bool_]) -> FloatArray:
        """Return the head as layers, for both variants [2]."""
        return np.array([float(self.head[on].min()), 0.0])


def _batches(most: int) -> FloatArray:
    """Return decode batches from 1 to `most`, denser at the low end, `most` included."""
    batches = list(range(1, min(most, EACH_BATCH) + 1))
    while batches[-1] < most:
        batches.append(min(most, max(batches[-1] + 1, math.floor(batches[-1] * BATCH_STEP))))
    return np.array(batches, dtype=np.float64)
