"""The verifier pool with this deployment's permission."""

from __future__ import annotations

import os

from stages.rewards.pool import VerifierPool
from stages.rewards.registry import ALLOW_CALLABLES_VARIABLE
from stages.rewards.spec import RewardsSpec


def may_call_python() -> bool:
    """Whether this deployment lets job files name Python functions."""
    return os.environ.get(ALLOW_CALLABLES_VARIABLE) == "1"


def open_pool(spec: RewardsSpec) -> VerifierPool:
    """Return the pool, a context manager.

    Raises:
        SpecFaultsError: every fault of the reward section.
    """
    return VerifierPool(spec, allow_python_callables=may_call_python())
