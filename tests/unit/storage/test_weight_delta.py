"""Deltas between safetensors files: exact, proved, refused on any doubt."""

from __future__ import annotations

import errno
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from storage.delta_apply import apply_deltas
from storage.errors import CorruptObjectError, DeltaMismatchError
from storage.sparse_codec import apply_block, encode_block, num_changed
from storage.weight_delta import WeightDelta, encode_delta, parse_delta
from storage.weights_hash import tensor_digests, weights_hash

NAME = "model.safetensors"


def weights(step: int = 0, *, size: int = 5000) -> bytes:
    """Tensors of several widths, an empty and a scalar one; some elements change with the step."""
    random = np.random.default_rng(0)
    tensors = {
        "a": random.standard_normal(size).astype(np.float16),
        "b": random.standard_normal((50, 7)).astype(np.float32),
        "c": random.integers(0, 255, 77).astype(np.uint8),
        "d": random.standard_normal(33),
        "empty": np.zeros(0, np.float32),
        "scalar": np.array(1.5, np.float32),
    }
    tensors["a"].view(np.uint16)[:: 97 - step] += np.uint16(step)
    tensors["b"][step, 3] += step
    tensors["d"][5] += step
    return save(tensors)


def write(folder: Path, data: bytes, name: str = NAME) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return {name: folder / name}


def delta_between(old: bytes, new: bytes, **options: int) -> WeightDelta:
    files = {NAME: new}
    data = encode_delta(
        {NAME: old}, files, base_weights_hash=weights_hash({NAME: old}), digests=tensor_digests(files), **options
    )
    assert data is not None
    return parse_delta(data, "delta")


@pytest.mark.parametrize("block_bytes", [512, 1024, 4 << 20])
def test_delta_gives_the_new_file_byte_for_byte(tmp_path: Path, block_bytes: int) -> None:
    old, new = weights(0), weights(3)
    apply_deltas(write(tmp_path / "base", old), [delta_between(old, new, block_bytes=block_bytes)], tmp_path)
    assert (tmp_path / NAME).read_bytes() == new


def test_chain_is_applied_in_one_pass(tmp_path: Path) -> None:
    steps = [weights(step) for step in range(4)]
    chain = [delta_between(old, new) for old, new in pairwise(steps)]
    apply_deltas(write(tmp_path / "base", steps[0]), chain, tmp_path)
    assert (tmp_path / NAME).read_bytes() == steps[3]


def test_bf16_weights_are_changed_bit_by_bit(tmp_path: Path) -> None:
    """The numpy bindings know no bf16; nan, infinities, both zeros and denormals are bits like others."""
    old = bytes([0, 0, 0, 0x80, 0x80, 0x7F, 0xC0, 0x7F, 1, 0, 0x80, 0x3F] * 50)
    new = bytearray(old)
    new[0:2], new[6:8], new[20:22] = b"\x00\x80", b"\xc1\xff", b"\x7f\x3f"
    files = [_bf16(old), _bf16(bytes(new))]
    apply_deltas(write(tmp_path / "base", files[0]), [delta_between(*files)], tmp_path)
    assert (tmp_path / NAME).read_bytes() == files[1]


def test_w13_delta_on_another_base_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """W13: base version must match, per-tensor checksum, mismatch raises, bad weights are never served."""
    delta = delta_between(weights(0), weights(1))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DeltaMismatchError, match=r"tensor \w+ is not what the delta promises"):
        apply_deltas(write(tmp_path / "base", weights(2)), [delta], out)
    assert list(out.iterdir()) == []


def test_w13_base_damaged_in_a_tensor_that_does_not_change_is_found(tmp_path: Path) -> None:
    old, new = weights(0), weights(1)
    damaged = bytearray(old)
    damaged[old.index(np.random.default_rng(0).standard_normal(5000).astype(np.float16).tobytes()[:64]) + 6] ^= 1
    with pytest.raises(DeltaMismatchError, match="tensor a is not what"):
        apply_deltas(write(tmp_path / "base", bytes(damaged)), [delta_between(old, new)], tmp_path)


def test_w14_missing_or_out_of_order_delta_is_refused(tmp_path: Path) -> None:
    """W14: a chain with a hole or in another order."""
    steps = [weights(step) for step in range(4)]
    chain = [delta_between(old, new) for old, new in pairwise(steps)]
    base = write(tmp_path / "base", steps[0])
    for wrong in ([chain[0], chain[2]], [chain[1], chain[0], chain[2]]):
        with pytest.raises(DeltaMismatchError, match="chain of deltas is broken"):
            apply_deltas(base, wrong, tmp_path)


def test_w17_files_of_another_layout_get_no_delta() -> None:
    """W17: deltas exist between serving-format files of one layout only; everything else goes whole."""
    old = weights(0)
    for new in (
        save({"a": np.zeros(3, np.float32)}),
        save({"a": np.zeros(3, np.float32)}, metadata={"format": "pt"}),
    ):
        assert _encoded(old, new) is None
    digests = tensor_digests({NAME: old})
    assert encode_delta({"other.safetensors": old}, {NAME: old}, base_weights_hash="0", digests=digests) is None


def test_dense_change_gets_no_delta() -> None:
    random = np.random.default_rng(1)
    old, new = (save({"a": random.standard_normal(9999).astype(np.float32)}) for _ in range(2))
    assert _encoded(old, new) is None


@pytest.mark.parametrize("place", [0, 9, 20, 60, -1])
def test_damaged_delta_is_refused_wherever_it_is_damaged(tmp_path: Path, place: int) -> None:
    old, new = weights(0), weights(1)
    data = bytearray(_encoded(old, new) or b"")
    data[place] ^= 0x10
    base = write(tmp_path / "base", old)
    try:
        apply_deltas(base, [parse_delta(bytes(data), "delta")], tmp_path)
    except CorruptObjectError:
        assert not (tmp_path / NAME).exists()
    else:  # bits that zstd does not look at; readers compare the whole delta's SHA-256 before
        assert place == -1
        assert (tmp_path / NAME).read_bytes() == new


@pytest.mark.parametrize("length", [0, 7, 16, 40, -1])
def test_truncated_delta_is_refused(length: int) -> None:
    data = _encoded(weights(0), weights(1)) or b""
    with pytest.raises(CorruptObjectError, match="no usable weight delta"):
        parse_delta(data[:length], "delta")


@pytest.mark.parametrize("other", ["motley.weight_delta/1", "motley.weight_delta/3"])
def test_delta_of_another_format_is_refused(other: str) -> None:
    from storage import weight_delta

    data = _encoded(weights(0), weights(1)) or b""
    length = int.from_bytes(data[8:16], "little")
    header = weight_delta._unpacked_json(memoryview(data)[16 : 16 + length])
    packed = weight_delta._packed_json({**header, "format": other})
    with pytest.raises(CorruptObjectError, match=r"this code reads 'motley\.weight_delta/2'"):
        parse_delta(data[:8] + len(packed).to_bytes(8, "little") + packed + data[16 + length :], "delta")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"proofs": {}}, "does not prove each of its tensors"),
        ({"block_bytes": 1 << 40}, "blocks cover 1099511627776 bytes"),
        ({"block_bytes": 0}, "blocks cover 0 bytes"),
        ({"block_bytes": 12}, "blocks cover 12 bytes"),
    ],
)
def test_header_that_contradicts_itself_is_refused(change: dict[str, object], fault: str) -> None:
    from storage import weight_delta

    data = _encoded(weights(0), weights(1)) or b""
    length = int.from_bytes(data[8:16], "little")
    header = weight_delta._unpacked_json(memoryview(data)[16 : 16 + length])
    packed = weight_delta._packed_json({**header, **change})
    with pytest.raises(CorruptObjectError, match=fault):
        parse_delta(data[:8] + len(packed).to_bytes(8, "little") + packed + data[16 + length :], "delta")


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_room_for_the_result_is_asked_for_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """A file system that cannot reserve room gets the file anyway; a full one says so and nothing is left."""

    def refuse(*_: int) -> None:
        raise OSError(error, "planned")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    old, new = weights(0), weights(1)
    base, delta, out = write(tmp_path / "base", old), delta_between(old, new), tmp_path / "out"
    out.mkdir()
    if error == errno.ENOSPC:
        with pytest.raises(OSError, match="planned"):
            apply_deltas(base, [delta], out)
        assert list(out.iterdir()) == []
    else:
        apply_deltas(base, [delta], out)
        assert (out / NAME).read_bytes() == new


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.3, 1.0])
@pytest.mark.parametrize("size", [0, 1, 7, 5001])
def test_block_round_trip(width: int, density: float, size: int) -> None:
    random = np.random.default_rng([width, size, int(1000 * density)])
    old = np.frombuffer(random.bytes(size * width), f"u{width}")
    new = old.copy()
    changed = random.random(size) < density
    new[changed] = np.frombuffer(random.bytes(size * width), f"u{width}")[changed]
    block = encode_block(old, new)
    found = old.copy()
    apply_block(found, block)
    assert found.tobytes() == new.tobytes()
    assert num_changed(block) == int((old != new).sum())


def test_block_of_another_length_is_refused() -> None:
    old = np.arange(10, dtype=np.uint16)
    block = encode_block(old, old + np.uint16(1))
    with pytest.raises(CorruptObjectError, match="9 elements were expected"):
        apply_block(np.arange(9, dtype=np.uint16), block)


def _encoded(old: bytes, new: bytes) -> bytes | None:
    files = {NAME: new}
    return encode_delta({NAME: old}, files, base_weights_hash=weights_hash({NAME: old}), digests=tensor_digests(files))


def _bf16(data: bytes) -> bytes:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [len(data) // 2], "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data
