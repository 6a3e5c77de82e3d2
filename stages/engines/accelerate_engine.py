"""Training engine on transformers and accelerate; also scores rows (reference log-probs, canary)."""

from __future__ import annotations

from stages.engines.training.policy_engine import PolicyEngine


class AccelerateEngine(PolicyEngine):
    """Whole weights on every rank, rows dealt out (data parallel)."""
