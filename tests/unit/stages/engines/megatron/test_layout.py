"""Ranks of a layout, and the degrees that a model can be split by."""

from __future__ import annotations

import pytest

from stages.engines.megatron.layout import MegatronLayout, RankCoordinates, layout_faults, slice_bounds

LAYOUT = MegatronLayout(tp=2, stage_layers=(1, 3, 2), shares=(5, 2))


def test_ranks_go_shard_by_shard_then_stage_by_stage_then_replica_by_replica() -> None:
    places = [
        RankCoordinates(replica=replica, stage=stage, shard=shard)
        for replica in range(2)
        for stage in range(3)
        for shard in range(2)
    ]

    assert [LAYOUT.coordinates(rank) for rank in range(LAYOUT.num_ranks)] == places


def test_stages_are_written_in_the_notation_of_the_library() -> None:
    assert LAYOUT.pipeline_string() == "Et|ttt|ttL"
    assert MegatronLayout(tp=1, stage_layers=(2, 1), shares=(1,)).pipeline_string() == "Ett|tL"
    assert MegatronLayout(tp=1, stage_layers=(2,), shares=(1,)).pipeline_string() is None
    assert [LAYOUT.first_layer(stage) for stage in range(3)] == [0, 1, 4]


def test_every_degree_that_does_not_fit_the_model_is_named() -> None:
    layout = MegatronLayout(tp=4, stage_layers=(2, 0), shares=(1,))

    assert layout_faults(layout, layers=3, heads=4, kv_heads=2, intermediate=6) == [
        "tensor_parallel 4 does not divide the model's 2 key-value heads",
        "tensor_parallel 4 does not divide the model's 6 feed-forward units",
        "stage_layers [2, 0] must be at least 1 each and add up to 3",
    ]
    assert layout_faults(LAYOUT, layers=6, heads=4, kv_heads=2, intermediate=6) == []


@pytest.mark.parametrize(
    ("size", "expected"), [(8, [(0, 2), (2, 4), (4, 6), (6, 8)]), (5, [(0, 2), (2, 4), (4, 5), (5, 5)])]
)
def test_slices_cover_a_dimension_once_and_the_last_ones_are_shorter(size, expected) -> None:
    assert [slice_bounds(size, shard, 4) for shard in range(4)] == expected
