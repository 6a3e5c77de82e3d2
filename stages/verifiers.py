"""The verifier pool with this deployment's permission."""

from __future__ import annotations

import os
from typing import Final

from stages.rewards.pool import VerifierPool
from stages.rewards.spec import RewardsSpec

ALLOW_CALLABLES_VARIABLE: Final = "MOTLEY_ALLOW_PYTHON_CALLABLES"
"""Environment variable; 1 lets job files name Python functions as rewards. Set by the owner of a deployment."""


def may_call_python() -> bool:
    """Whether this deployment lets job files name Python functions."""
    return os.environ.get(ALLOW_CALLABLES_VARIABLE) == "1"


def open_pool(spec: RewardsSpec) -> VerifierPool:
    """Return the pool, a context manager.

    Raises:
        SpecFaultsError: every fault of the reward section.
    """
    return VerifierPool(spec, allow_python_callables=may_call_python())
