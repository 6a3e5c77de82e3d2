"""Which cost model prices a plan: the published formulas, or those with corrections and coefficients."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from plans.cost.calibration import Calibration


class CostMode(StrEnum):
    """Formulas in use."""

    PAPER = "paper"
    CALIBRATED = "calibrated"


class Fanout(StrEnum):
    """How new actor weights reach generation GPUs that did not train them (reconstruction, hetrl.md 4.6)."""

    DIRECT = "direct"
    """Every generation tasklet pulls its own shard from the cheapest training replica."""
    SEQUENTIAL = "sequential"
    """One sender serves a full copy to each generation machine in turn."""
    PER_REGION = "per_region"
    """One full copy into each remote region, then copies inside it at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Everything that decides the price of a plan beside cluster, job and plan."""

    mode: CostMode
    """Formulas in use."""
    calibration: Calibration = field(default_factory=Calibration)
    """Coefficients; read in calibrated mode only."""
    eta: float | None = None
    """Override of the parallelism factor of Phi in [0, 1]; None = exact, from the grouping (hetrl.md 4.3)."""
    fanout: Fanout = Fanout.DIRECT
    """Fan-out of weight transfers between different GPUs."""
    delta_fraction: float = 1.0
    """Share of the weight bytes that a transfer sends, in (0, 1]; 1 = full copies."""

    def __post_init__(self) -> None:
        """Refuse factors outside their range."""
        if self.eta is not None and not 0.0 <= self.eta <= 1.0:
            raise ValueError(f"eta is {self.eta}, but it lies in [0, 1]")
        if not 0.0 < self.delta_fraction <= 1.0:
            raise ValueError(f"delta_fraction is {self.delta_fraction}, but it lies in (0, 1]")

    @classmethod
    def paper(cls, *, eta: float | None = None, fanout: Fanout = Fanout.DIRECT) -> CostModel:
        """Return the published model (HetRL v1, Appendix B), nothing added."""
        return cls(mode=CostMode.PAPER, eta=eta, fanout=fanout)

    @classmethod
    def calibrated(
        cls,
        calibration: Calibration | None = None,
        *,
        fanout: Fanout = Fanout.PER_REGION,
        delta_fraction: float = 1.0,
    ) -> CostModel:
        """Return the corrected model (hetrl.md 4.8), with built-in coefficients where none are given."""
        chosen = calibration if calibration is not None else Calibration()
        return cls(mode=CostMode.CALIBRATED, calibration=chosen, fanout=fanout, delta_fraction=delta_fraction)

    @property
    def is_paper(self) -> bool:
        """Whether only the published formulas are used."""
        return self.mode is CostMode.PAPER

    @property
    def sync_factor(self) -> float:
        """Multiplier of weight transfers; 1 in paper mode."""
        return 1.0 if self.is_paper else self.calibration.sync_factor
