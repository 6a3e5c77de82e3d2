"""Service times of single operations: what one pipeline stage needs for some tokens.

Derived from the exact shape (grouped-query attention, vocabulary matrix), independently of `plans.cost`. Per token
and layer a forward pass does 2 FLOPs per weight and 4 FLOPs per attended position and attention channel; a backward
pass twice that; full recomputation repeats the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plans.errors import NoRouteError
from plans.simulate.settings import Efficiency, Straggler
from plans.spec.cluster import Cluster
from plans.spec.llm import LlmShape
from plans.workflow import TaskKind

PEAK = Efficiency()


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlace:
    """One pipeline stage of one replica, on its GPUs."""

    kind: TaskKind
    """Kind of the task: GPUs reach another share of their peak in each."""
    shape: LlmShape
    gpus: tuple[int, ...]
    """GPU indices of the tensor-parallel ranks."""
    layers: int
    is_first: bool
    is_last: bool
    has_scalar_head: bool
    bytes_per_value: int
    """Bytes of one weight or activation."""

    @property
    def weight_bytes(self) -> float:
        """Weights of the whole stage, all ranks together."""
        shape = self.shape
        values = self.layers * shape.layer_parameters
        if self.is_first:
            values += shape.embedding_parameters
        if self.is_last and not self.has_scalar_head and not (shape.tied and self.is_first):
            values += shape.embedding_parameters
        return float(values * self.bytes_per_value)

    @property
    def read_bytes(self) -> float:
        """Weights that a decode step reads: the layers and the head, of the embedding only the rows of its tokens."""
        values = self.layers * self.shape.layer_parameters
        if self.is_last and not self.has_scalar_head:
            values += self.shape.embedding_parameters
        return float(values * self.bytes_per_value)


class Physics:
    """Service times on the GPUs of one cluster."""

    def __init__(self, cluster: Cluster, efficiency: Mapping[str, Efficiency], stragglers: Sequence[Straggler]) -> None:
        """Resolve efficiency and slowdown of every GPU."""
        view = cluster.view
        self._view = view
        per_gpu = [efficiency.get(view.type_names[view.type_of[g]], PEAK) for g in range(view.num_gpus)]
        slowdown = {view.gpu_index[s.gpu]: s.slowdown for s in stragglers}
        slow = [slowdown.get(g, 1.0) for g in range(view.num_gpus)]
        self._flop_per_s = {
            kind: [float(view.compute_flop_per_s[g]) * e.compute_of(kind) / slow[g] for g, e in enumerate(per_gpu)]
            for kind in TaskKind
        }
        self._hbm_bytes_per_s = [float(view.hbm_bytes_per_s[g]) * e.hbm / slow[g] for g, e in enumerate(per_gpu)]
        self._overhead_s = [e.step_overhead_s * slow[g] for g, e in enumerate(per_gpu)]
        self._layer_overhead_s = [e.decode_layer_overhead_s * slow[g] for g, e in enumerate(per_gpu)]
        self._within = [e.network for e in per_gpu]
        self._between = [e.network if e.network_between is None else e.network_between for e in per_gpu]

    def link(self, gpu_a: int, gpu_b: int) -> tuple[float, float]:
        """Return one-way latency (s) and effective bandwidth (bytes/s) between two GPUs."""
        edge, machine_of = self._view.edge(gpu_a, gpu_b), self._view.machine_of
        shares = self._within if machine_of[gpu_a] == machine_of[gpu_b] else self._between
        return edge.latency_s, edge.bytes_per_s * min(shares[gpu_a], shares[gpu_b])

    def can_send(self, gpu_a: int, gpu_b: int) -> bool:
        """Tell whether the link between two GPUs is permitted."""
        return self._view.edge(gpu_a, gpu_b).bytes_per_s > 0.0

    def permitted_link(self, gpu_a: int, gpu_b: int) -> tuple[float, float]:
        """Return latency (s) and bandwidth (bytes/s) of a link that a plan sends over.

        Raises:
            NoRouteError: the link is forbidden.
        """
        if not self.can_send(gpu_a, gpu_b):
            first, second = self._view.gpu_ids[gpu_a], self._view.gpu_ids[gpu_b]
            raise NoRouteError(
                f"the plan sends from {first} to {second}, but the cluster forbids the link between them; "
                "plan again, or permit the link in the cluster file."
            )
        return self.link(gpu_a, gpu_b)

    def forward_s(self, stage: StagePlace, tokens: float, attended: float, logit_tokens: float) -> float:
        """Seconds of a forward pass.

        Args:
            stage: where it runs.
            tokens: tokens in the pass.
            attended: sum over these tokens of the positions that each attends to.
            logit_tokens: tokens for which the last stage computes logits.
        """
        compute = self._compute_s(stage, self._flop(stage, tokens, attended, logit_tokens))
        return compute + self._all_reduces_s(stage, tokens, count=2) + self._overhead(stage)

    def backward_s(
        self, stage: StagePlace, tokens: float, attended: float, logit_tokens: float, *, is_recomputed: bool
    ) -> float:
        """Seconds of a backward pass; with full recomputation the forward pass is done again first."""
        passes = 3 if is_recomputed else 2
        compute = self._compute_s(stage, self._flop(stage, tokens, attended, logit_tokens) * passes)
        reduces = self._all_reduces_s(stage, tokens, count=4 if is_recomputed else 2)
        return compute + reduces + self._overhead(stage)

    def decode_step_s(self, stage: StagePlace, sequences: float, cached_tokens: float) -> float:
        """Seconds of one decode step of a batch: the slower of reading weights and cache, and computing."""
        shape = stage.shape
        copies = max(1.0, len(stage.gpus) / shape.kv_heads)  # more ranks than key/value heads hold copies of them
        kv_values = 2 * shape.kv_heads * shape.head_dim
        kv_bytes = cached_tokens * stage.layers * kv_values * stage.bytes_per_value * copies
        read = (stage.read_bytes + kv_bytes) / self._slowest(stage, self._hbm_bytes_per_s)
        compute = self._compute_s(stage, self._flop(stage, sequences, cached_tokens, sequences))
        fixed = self._overhead(stage) + stage.layers * max(self._layer_overhead_s[g] for g in stage.gpus)
        return max(read, compute) + self._all_reduces_s(stage, sequences, count=2) + fixed

    def optimizer_step_s(self, stage: StagePlace, bytes_per_parameter: float) -> float:
        """Seconds of one optimiser update: every optimiser byte is read and written once."""
        values = stage.weight_bytes / stage.bytes_per_value
        return 2 * values * bytes_per_parameter / self._slowest(stage, self._hbm_bytes_per_s)

    def activation_bytes(self, stage: StagePlace, tokens: float) -> float:
        """Bytes that leave a stage for the next one."""
        return tokens * stage.shape.hidden * stage.bytes_per_value

    def _flop(self, stage: StagePlace, tokens: float, attended: float, logit_tokens: float) -> float:
        shape = stage.shape
        matrices = shape.attention_parameters + shape.mlp_parameters
        flop = stage.layers * (2 * tokens * matrices + 4 * attended * shape.heads * shape.head_dim)
        if stage.is_last:
            width = 1 if stage.has_scalar_head else shape.vocab
            flop += 2 * logit_tokens * shape.hidden * width
        return flop

    def _compute_s(self, stage: StagePlace, flop: float) -> float:
        return flop / self._slowest(stage, self._flop_per_s[stage.kind])

    def _slowest(self, stage: StagePlace, rates: Sequence[float]) -> float:
        """Return the rate of the whole stage: its ranks wait for the slowest one."""
        return min(rates[g] for g in stage.gpus) * len(stage.gpus)

    def _overhead(self, stage: StagePlace) -> float:
        return max(self._overhead_s[g] for g in stage.gpus)

    def _all_reduces_s(self, stage: StagePlace, tokens: float, *, count: int) -> float:
        """Seconds of `count` ring all-reduces per layer among the ranks, each in 2(n-1) hops."""
        ranks = len(stage.gpus)
        if ranks == 1:
            return 0.0
        chunk = self.activation_bytes(stage, tokens) / ranks
        hops = [self.permitted_link(a, b) for a, b in zip(stage.gpus, stage.gpus[1:] + stage.gpus[:1], strict=True)]
        hop_s = max(latency + chunk / rate for latency, rate in hops)
        return stage.layers * count * 2 * (ranks - 1) * hop_s
