"""What was compiled before is used for exactly the sources that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from numba import njit

import plans
from plans.cost.compiled import jit
from plans.cost.compiled.jit import compiled, stamp_of, told_of_compiling

PLANS = Path(plans.__file__).parent


def twice(number: float) -> float:
    return 2.0 * number


def test_stamp_changes_with_any_source_of_any_compiled_package(tmp_path: Path) -> None:
    seen = set()
    for place, text in (("cost", "a"), ("search", "a"), ("cost", "b"), ("search", "c")):
        file = tmp_path / place / "compiled" / "rings.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        seen.add(stamp_of(tmp_path))
    assert len(seen) == 4
    assert len(sorted(PLANS.glob("*/compiled/*.py"))) > 10
    assert stamp_of(PLANS) == jit._STAMP


def test_compiling_is_told_before_it_is_done_once_and_only_where_nothing_was_kept() -> None:
    told: list[int] = []
    new: Any = njit(twice)
    with told_of_compiling(lambda: told.append(len(new.signatures))):
        new(2.0)
        new(2)
        new(3.0)
    assert told == [0]
    new(np.float32(2.0))
    assert told == [0]


def test_code_kept_for_other_sources_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found when a callee was edited: numba kept its old code inside callers in other files."""
    first: Any = compiled(twice)
    assert first(2.0) == 4.0
    assert sum(first.stats.cache_hits.values()) + sum(first.stats.cache_misses.values()) == 1
    again: Any = compiled(twice)
    assert again(2.0) == 4.0
    assert sum(again.stats.cache_hits.values()) == 1
    monkeypatch.setattr(jit, "_STAMP", "of other sources")
    changed: Any = compiled(twice)
    assert changed(2.0) == 4.0
    assert sum(changed.stats.cache_hits.values()) == 0
