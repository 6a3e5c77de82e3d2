"""AdamW whose state is spread over the replicas (megatron-core's distributed optimizer), behind a few methods.

Each replica updates its part of every parameter and the parts are gathered afterwards. Moments go in and out as whole
shards of a parameter, so that resume points know nothing of replicas.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn
from torch import distributed as dist

from stages.engines.megatron.replacing import replaced
from stages.spec.execution import OptimizerSpec

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""AdamW's state by its names in a resume point, beside `step`."""


class ShardedAdam:
    """The optimizer of one rank."""

    def __init__(self, model: DistributedDataParallel, replicas: Any, *, is_bf16: bool) -> None:  # noqa: ANN401
        """Make an optimizer without state; main weights are copied from the model's.

        Args:
            model: Wrapped for sums of gradients, with `use_distributed_optimizer`.
            replicas: Process group of the ranks that hold the same weights.
            is_bf16: Whether the model's weights are bf16; main weights are fp32.
        """
        config = OptimizerConfig(
            optimizer="adam", lr=0.0, weight_decay=0.0, bf16=is_bf16, use_distributed_optimizer=True, clip_grad=0.0,
            params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        )  # fmt: skip
        # Where Transformer Engine or Apex is installed megatron-core would take its Adam, whose state is laid out
        # otherwise; resume points are those of torch's AdamW.
        with replaced(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", True):
            chained = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
        self._optimizer: Any = chained.chained_optimizers[0]
        self._replicas = replicas
        self._is_bf16 = is_bf16

    def set_hyperparameters(self, spec: OptimizerSpec, learning_rate: float) -> None:
        """Set what the next step uses; norms have no weight decay."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            group["betas"] = spec.betas
            group["eps"] = spec.eps
            group["weight_decay"] = spec.weight_decay * group["wd_mult"]

    def clip(self, max_grad_norm: float) -> float:
        """Take the gradients over and clip them; return the norm of the whole model's gradient before."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.clip_grad_norm(max_grad_norm))

    def step(self) -> None:
        """Update this replica's part of the weights and gather the others' parts."""
        self._optimizer.step_with_ready_grads()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad()

    @property
    def has_state(self) -> bool:
        """Whether a step was made or a state was set, on any replica."""
        found = torch.tensor([float(len(self._optimizer.optimizer.state))], device=self._device)
        dist.all_reduce(found, group=self._replicas)
        return bool(found.item())

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return moments of the shape of a parameter and the step count; all replicas call it together."""
        part = self._part(parameter)
        state = {} if part is None else self._optimizer.optimizer.state[part[0]]
        moments = {name: self._over_replicas(parameter, part, state.get(name)) for name in MOMENTS}
        # Every replica that has a part has the same count.
        count = torch.zeros((), device=self._device) if part is None else state["step"].to(self._device).clone()
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._replicas)
        return {**moments, "step": count}

    def main_weight(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter in fp32 as the optimizer has it; all replicas call it together."""
        if not self._is_bf16:
            return parameter.detach()
        part = self._part(parameter)
        return self._over_replicas(parameter, part, None if part is None else part[0].detach())

    def set_state(self, parameter: nn.Parameter, moments: dict[str, Tensor], step: Tensor) -> None:
        """Replace the moments of a parameter by this replica's part of some of its shape."""
        part = self._part(parameter)
        if part is None:
            return
        main, bounds = part
        state = {name: moments[name].reshape(-1)[bounds].to(main.device, torch.float32).clone() for name in MOMENTS}
        # Torch's AdamW keeps its count on the CPU; one tensor per parameter, as it counts in place.
        self._optimizer.optimizer.state[main] = {**state, "step": step.detach().cpu().float().clone()}

    def set_main_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace the fp32 weights of a parameter by this replica's part of some of its shape."""
        part = self._part(parameter)
        if part is not None and self._is_bf16:
            with torch.no_grad():
                part[0].copy_(value.reshape(-1)[part[1]])

    @property
    def _device(self) -> torch.device:
        return torch.device(torch.cuda.current_device())

    def _part(self, parameter: nn.Parameter) -> tuple[Tensor, slice] | None:
        """This replica's main weights of a parameter and where they stand in it; None = other replicas have all."""
        place = self._optimizer.model_param_group_index_map.get(parameter)
        if place is None:
            return None
        group, order = place
        main = self._optimizer.optimizer.param_groups[group]["params"][order]
        bounds = self._optimizer._get_model_param_range_map(parameter)["param"]
        return main, slice(bounds.start, bounds.end)

    def _over_replicas(
        self, parameter: nn.Parameter, part: tuple[Tensor, slice] | None, values: Tensor | None
    ) -> Tensor:
        """Put the replicas' parts of something of a parameter's size together, fp32, in its shape."""
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=self._device)
        if part is not None and values is not None:
            whole[part[1]] = values.reshape(-1).float()
        # Each place is 0 on all replicas but one, so the sum is exact.
        dist.all_reduce(whole, group=self._replicas)
        return whole.view(parameter.shape)
