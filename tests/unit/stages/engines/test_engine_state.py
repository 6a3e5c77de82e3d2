"""What an engine knows of its weights."""

from __future__ import annotations

import pytest

from stages.engines.engine_state import WeightState
from stages.errors import EngineError


def test_fresh_engine_has_no_version_and_asks_for_weights() -> None:
    state = WeightState("e")
    assert (state.policy_version, state.weights_hash, state.unusable_reason) == (None, None, None)
    with pytest.raises(EngineError, match="holds no policy version yet; call load_weights first"):
        state.require_weights()


def test_finished_load_names_the_weights() -> None:
    state = WeightState("e")
    with state.replacing(4, "h"):
        assert state.policy_version is None
    state.require_weights()
    assert (state.policy_version, state.weights_hash) == (4, "h")


def test_load_that_fails_half_way_makes_the_engine_unusable() -> None:
    state = WeightState("e")
    with state.replacing(4, "h"):
        pass
    with pytest.raises(OSError, match="disk"), state.replacing(5, "i"):
        raise OSError("disk")
    assert (state.policy_version, state.weights_hash) == (None, None)
    with pytest.raises(EngineError, match=r"version 5 failed half-way \(OSError: disk\); start a new one"):
        state.require_usable()
    with pytest.raises(EngineError, match="half-way"), state.replacing(6, "j"):
        pass
