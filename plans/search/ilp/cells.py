"""What a pipeline stage of one replica costs and holds at the least, by the machine that it is on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plans.cost.collectives import LinkTimes
from plans.cost.terms import DecodeTerms, TaskTerms
from plans.memory import TaskMemory
from plans.search.ilp.replicas import CellTimes, FloatArray
from plans.workflow import TaskKind


class CellBook:
    """Builds `CellTimes` of one task: types are the machines, and last, with tp > 1, cells over several machines.

    A cell over several machines is at least as slow as the two fastest machines together, over the fastest link
    between any two, and holds no more than the roomiest machine's GPUs.
    """

    def __init__(
        self,
        terms: TaskTerms,
        links: LinkTimes,
        memory: TaskMemory,
        *,
        gpus: Sequence[int],
        first_gpu: Sequence[int],
        room_bytes: FloatArray,
        micro_batch_size: int,
    ) -> None:
        """Keep the constants.

        Args:
            terms: constants of the task.
            links: times over links.
            memory: memory of the task.
            gpus: GPUs of each machine [M].
            first_gpu: a GPU of each machine [M].
            room_bytes: bytes that the task may fill on a GPU of each machine [M].
            micro_batch_size: samples per micro-batch.
        """
        self.terms, self.links, self.memory, self.gpus = terms, links, memory, list(gpus)
        self.flop_per_s = terms.compute_flop_per_s[list(first_gpu)]
        self.hbm_bytes_per_s = terms.hbm_bytes_per_s[list(first_gpu)]
        decode = terms.decode
        self.overhead_s = np.zeros(len(gpus)) if decode is None else decode.layer_overhead_s[list(first_gpu)]
        self.room_bytes, self.mbs = room_bytes, micro_batch_size

    def plain(self, pp: int, tp: int, dp: int) -> CellTimes:
        """Return the cells of a task that doesn't decode [G = 1]."""
        terms = self.terms
        layer = self._spread(terms.passes * terms.layer_flop / (self.flop_per_s * tp), tp)
        layer = layer + terms.tp_count / self.mbs * self._ring_s(terms.tp_bytes(self.mbs, tp), tp)
        head = self._spread(terms.passes * terms.head_flop / (self.flop_per_s * tp), tp)
        transfer = terms.pp_count / self.mbs * self._nearest(self._edges(terms.pp_bytes(self.mbs)), tp)
        most = self._most_layers(pp, tp, dp, cache_bytes=0.0)
        return CellTimes(layer[None, None], head[None, None], transfer[None], most[None])

    def decoding(
        self, decode: DecodeTerms, pp: int, tp: int, batches: FloatArray, least: FloatArray | None = None
    ) -> CellTimes:
        """Return the cells of generation for each decode batch [G].

        Args:
            decode: constants of decoding.
            pp: stages.
            tp: GPUs of a cell.
            batches: sequences decoded together [G].
            least: sequences whose cache must fit [G]; absent = the same. With fewer of them the cells bound every
                batch between the two, as a larger batch is faster and a smaller one fits where a larger one does.
        """
        held = batches if least is None else least
        terms, response, groups = self.terms, decode.lengths.response, decode.groups(pp)
        passes = (response * groups / batches)[:, None]  # of each stage's weights, per sample
        flat = self._spread(terms.passes * terms.layer_flop / (self.flop_per_s * tp), tp)
        flat = flat + terms.tp_count / self.mbs * self._ring_s(terms.tp_bytes(self.mbs, tp), tp)
        reads = self._spread(decode.layer_bytes / tp / self.hbm_bytes_per_s + self.overhead_s, tp)
        cache = self._spread(response * decode.cache_bytes / min(tp, decode.kv_heads) / self.hbm_bytes_per_s, tp)
        work = self._spread(response * decode.layer_flop / tp / self.flop_per_s, tp)
        overhead = self._spread(self.overhead_s, tp)
        flat = np.repeat(flat[None], len(batches), axis=0)
        if decode.tp_count and tp > 1:
            ring = [self._ring_s(b / groups * decode.token_bytes * (2.0 * (tp - 1) / tp), tp) for b in batches]
            flat = flat + passes * decode.tp_count * np.array(ring)
        layer = np.stack([flat + passes * reads + cache, flat + work + passes * overhead], axis=1)
        head_read = passes * self._spread(decode.head_bytes / tp / self.hbm_bytes_per_s, tp)
        head_work = np.broadcast_to(
            response * self._spread(decode.head_flop / tp / self.flop_per_s, tp), head_read.shape
        )
        transfer = np.array([self._decode_transfer_s(decode, response, groups, tp, b) for b in batches.tolist()])
        one = self.memory.cache_bytes(1, tp)
        most = np.stack([self._most_layers(pp, tp, 1, cache_bytes=b * one) for b in held.tolist()])
        return CellTimes(layer, np.stack([head_read, head_work], axis=1), transfer, most)

    def _decode_transfer_s(
        self, decode: DecodeTerms, response: float, groups: int, tp: int, batch: float
    ) -> FloatArray:
        terms = self.terms
        edges = terms.pp_count / self.mbs * self._edges(terms.pp_bytes(self.mbs))
        if decode.token_bytes:
            edges = edges + response * groups / batch * self._edges(batch / groups * decode.token_bytes)
        return self._nearest(edges, tp)

    def _most_layers(self, pp: int, tp: int, dp: int, *, cache_bytes: float) -> FloatArray:
        """Return the most layers that fit as inner, first, last, only stage [4, T]."""
        rows = []
        for is_first, is_last in ((False, False), (True, False), (False, True), (True, True)):
            stage = pp - 1 if is_last else 0
            held = np.array([
                self.memory.model_bytes(count, is_first=is_first, is_last=is_last, tp=tp, dp=dp)
                + max(self._working(count, stage, pp, tp, dp), count * cache_bytes)
                for count in range(1, self.terms.num_layers + 1)
            ])  # fmt: skip
            rows.append((held[:, None] <= self.room_bytes * (1.0 + 1e-9)).sum(axis=0).astype(np.float64))
        most = np.array(rows)
        if self._can_spread(tp):
            most = np.concatenate([most, most.max(axis=1, keepdims=True)], axis=1)
        return most

    def _working(self, layers: int, stage: int, pp: int, tp: int, dp: int) -> float:
        if self.terms.task.kind is TaskKind.GENERATION:
            return 0.0
        return self.memory.working_bytes(
            layers, stage=stage, num_stages=pp, tp=tp, dp=dp, micro_batch_size=self.mbs, micro_batches=1
        )

    def _can_spread(self, tp: int) -> bool:
        return tp > 1 and len(self.gpus) > 1

    def _spread(self, values: FloatArray, tp: int) -> FloatArray:
        """Append the value of a cell over several machines: at least the second smallest of them."""
        if not self._can_spread(tp):
            return values
        return np.append(values, np.partition(values, 1)[1])

    def _edges(self, num_bytes: float, steps: int = 1) -> FloatArray:
        return self.links.edge_matrix(range(len(self.gpus)), num_bytes, steps)

    def _ring_s(self, num_bytes: float, tp: int) -> FloatArray:
        """Return the least ring of a cell of each type [T]; 0 for one GPU."""
        if tp == 1:
            return np.zeros(len(self.gpus))
        edges = self._edges(num_bytes, 2 * (tp - 1) if self.links.latency_per_step else 1)
        inside: FloatArray = edges.diagonal().copy()
        if not self._can_spread(tp):
            return inside
        between = edges + np.diag(np.full(len(edges), np.inf))
        return np.append(inside, between.min())

    def _nearest(self, edges: FloatArray, tp: int) -> FloatArray:
        """Return the least transfer from a cell of each type to any other [T]."""
        lonely = np.array(self.gpus) < 2
        open_edges = edges + np.diag(np.where(lonely, np.inf, 0.0))
        nearest: FloatArray = open_edges.min(axis=1)
        return np.append(nearest, nearest.min()) if self._can_spread(tp) else nearest
