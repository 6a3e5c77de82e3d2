"""Training engine on transformers and accelerate; also scores rows (reference log-probs, canary)."""

from __future__ import annotations

from pathlib import Path

from stages.engines.launch import EngineLaunch
from stages.engines.training.policy_engine import PolicyEngine


class AccelerateEngine(PolicyEngine):
    """Rows dealt out to ranks (data parallel), weights whole on each or spread; trains them, or adapters on them."""

    def __init__(self, launch: EngineLaunch, model_dir: Path) -> None:
        """Load the model on every rank; see `RankedEngine`."""
        if launch.lora is not None:
            self.kind = "adapter"
        super().__init__(launch, model_dir)
