"""Which rank holds which part of the model, and which degrees a model can be split by. Pure arithmetic.

A plan lists the devices of a task replica by replica, stage by stage, shard by shard. Rank r is the r-th of them, so
tensor-parallel ranks are neighbours, then come the pipeline stages, then the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RANK_ORDER = "tp-cp-ep-pp-dp"
"""megatron-core's name of this order, fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """Where a rank stands."""

    replica: int
    stage: int
    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """Parallel degrees of a training engine."""

    tp: int
    """Tensor shards of a stage."""
    stage_layers: tuple[int, ...]
    """Layers of each pipeline stage; the number of stages is the pipeline-parallel degree."""
    shares: tuple[int, ...]
    """Samples of each replica in the plan; rows are dealt out in proportion."""

    @property
    def pp(self) -> int:
        """Pipeline stages of a replica."""
        return len(self.stage_layers)

    @property
    def dp(self) -> int:
        """Replicas."""
        return len(self.shares)

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return where a rank stands."""
        replica, inside = divmod(rank, self.pp * self.tp)
        stage, shard = divmod(inside, self.tp)
        return RankCoordinates(replica=replica, stage=stage, shard=shard)

    def first_layer(self, stage: int) -> int:
        """Return the first layer of a stage, counted over the model."""
        return sum(self.stage_layers[:stage])

    def pipeline_string(self) -> str | None:
        """Return megatron-core's notation of the stages (E embedding, t layer, L loss); None with one stage."""
        if self.pp == 1:
            return None
        stages = ["t" * layers for layers in self.stage_layers]
        return "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])


def layout_faults(layout: MegatronLayout, *, layers: int, heads: int, kv_heads: int, intermediate: int) -> list[str]:
    """Return why a model can't be split so, one clause per fault.

    Args:
        layout: Parallel degrees.
        layers: Layers of the model.
        heads: Query heads.
        kv_heads: Key-value heads.
        intermediate: Width of the feed-forward layers.
    """
    faults = [
        f"tensor_parallel {layout.tp} does not divide the model's {count} {name}"
        for name, count in (("query heads", heads), ("key-value heads", kv_heads), ("feed-forward units", intermediate))
        if count % layout.tp
    ]
    if sum(layout.stage_layers) != layers or min(layout.stage_layers, default=0) < 1:
        faults.append(f"stage_layers {list(layout.stage_layers)} must be at least 1 each and add up to {layers}")
    return faults


def slice_bounds(size: int, shard: int, num_shards: int) -> tuple[int, int]:
    """Return start and end of a shard of a dimension; the last shards of one that isn't divisible are shorter."""
    width = -(-size // num_shards)
    return min(shard * width, size), min((shard + 1) * width, size)


def equal_layers(stage_layers_of_replicas: Sequence[Sequence[int]]) -> bool:
    """Whether all replicas cut the model at the same layers, as gradients summed over replicas require."""
    return len({tuple(layers) for layers in stage_layers_of_replicas}) <= 1
