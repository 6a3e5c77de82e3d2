"""Shapes of tiles depend on the row and the model alone."""

from __future__ import annotations

from stages.engines.tiles import TileShape, blocks, grouped, padded_length


def test_padded_length_steps_through_few_values() -> None:
    assert [padded_length(n) for n in (0, 1, 8, 9, 32, 33, 64, 65, 256, 257, 400)] == [
        0, 8, 8, 16, 32, 64, 64, 96, 256, 384, 512,
    ]  # fmt: skip


def test_small_models_get_many_rows() -> None:
    small, large = TileShape.for_model(128, 16, "cpu"), TileShape.for_model(576, 49152, "cpu")
    assert (small.decode_rows, large.decode_rows) == (256, 16)
    assert (small.prefill_rows(16), large.prefill_rows(32), large.prefill_rows(2048)) == (32, 4, 1)


def test_devices_with_many_cores_get_larger_tiles() -> None:
    shape = TileShape.for_model(576, 49152, "cuda")
    assert (shape.decode_rows, shape.prefill_tokens) == (32, 1024)


def test_scoring_tiles_bound_the_logits() -> None:
    shape = TileShape.for_model(576, 150_000, "cuda")
    assert shape.scoring_rows(128, 128) * 128 * 150_000 * 8 <= 2**28
    assert shape.scoring_rows(512, 512) == 1


def test_blocks_and_groups_keep_the_order() -> None:
    assert [list(block) for block in blocks(range(5), 2)] == [[0, 1], [2, 3], [4]]
    assert grouped(["b", "a", "b"]) == {"b": [0, 2], "a": [1]}
