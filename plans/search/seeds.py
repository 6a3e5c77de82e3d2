"""Random streams that depend on what they are for, never on who draws or when."""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, *identity: object) -> np.random.Generator:
    """Return the generator of a purpose, such as `stream(seed, "arm", grouping, sizes)`.

    The identity enters through its text, so equal identities give equal streams in every process.
    """
    digest = hashlib.sha256("\x1f".join(str(part) for part in identity).encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]
    return np.random.default_rng([seed, *words])
