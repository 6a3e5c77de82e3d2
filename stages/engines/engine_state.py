"""Which weights an engine holds, and whether it can still be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stages.errors import EngineError


class WeightState:
    """Policy version and hash of an engine's weights, and the reason why it can't be used any more.

    A load that fails half-way leaves a mixture of two versions; from then on every use is refused.
    """

    def __init__(self, engine_name: str) -> None:
        self._engine_name = engine_name
        self.policy_version: int | None = None
        """Version of the weights; None before the first load or when the weights have no name yet."""
        self.weights_hash: str | None = None
        """Hash that came with the weights."""
        self.unusable_reason: str | None = None
        """Why the engine can't be used; None while it can."""

    def require_usable(self) -> None:
        """Raise `EngineError` once a failure has made the engine unusable."""
        if self.unusable_reason is not None:
            raise EngineError(
                f"engine {self._engine_name!r} can't be used any more: {self.unusable_reason}; start a new one",
                engine=self._engine_name,
                reason=self.unusable_reason,
            )

    def require_weights(self) -> None:
        """Raise `EngineError` unless named weights have been loaded."""
        self.require_usable()
        if self.policy_version is None:
            raise EngineError(
                f"engine {self._engine_name!r} holds no policy version yet; call load_weights first",
                engine=self._engine_name,
            )

    def held(self) -> tuple[int, str]:
        """Return version and hash of the weights; `EngineError` unless named ones have been loaded."""
        self.require_weights()
        if self.policy_version is None or self.weights_hash is None:
            raise EngineError(f"engine {self._engine_name!r} holds weights without a name; load a policy version")
        return self.policy_version, self.weights_hash

    def give_up(self, reason: str) -> None:
        """Refuse every later use, with `reason`."""
        self.unusable_reason = reason
        self.policy_version = None
        self.weights_hash = None

    @contextmanager
    def replacing(self, policy_version: int, weights_hash: str) -> Iterator[None]:
        """Guard the part of a load that touches weights: success names them, any failure makes the engine unusable."""
        self.require_usable()
        self.policy_version = None
        self.weights_hash = None
        try:
            yield
        except BaseException as error:
            self.give_up(f"loading policy version {policy_version} failed half-way ({type(error).__name__}: {error})")
            raise
        self.policy_version = policy_version
        self.weights_hash = weights_hash
