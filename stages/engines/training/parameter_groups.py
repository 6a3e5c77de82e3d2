"""AdamW with weight decay on matrices only."""

from __future__ import annotations

import torch
from torch import nn

from stages.spec.execution import OptimizerSpec


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the model's parameters, norms and biases (fewer than two dimensions) in a group without decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "has_decay": True},
        {"params": [p for p in parameters if p.ndim < 2], "has_decay": False},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, fused=True)


def set_hyperparameters(optimizer: torch.optim.Optimizer, spec: OptimizerSpec, learning_rate: float) -> None:
    """Set what the next step uses; nothing of the spec is kept in a resume point."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        group["betas"] = spec.betas
        group["eps"] = spec.eps
        group["weight_decay"] = spec.weight_decay if group["has_decay"] else 0.0
