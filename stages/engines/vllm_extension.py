"""What Motley adds to vLLM's worker: a complete weight update in place, and scores at a temperature.

vLLM mixes this class into its worker (`worker_extension_cls`); its methods are called with `collective_rpc`.
"""

from __future__ import annotations

from typing import Any

import torch


class PolicyWorker:
    """Methods added to a vLLM worker; `self` is the worker."""

    model_runner: Any
    """vLLM's model runner."""
    reload_weights: Any
    """vLLM's in-place reload."""

    def motley_load(self, directory: str) -> None:
        """Replace the weights in place by those of a directory, packed copies included."""
        self.reload_weights(weights_path=directory)
        model = self.model_runner.get_model()
        repack_cpu_linears(model)
        pad_single_rows(model)

    def motley_keep(self) -> None:
        """Let the weights that the engine was started with compute as reloaded ones do."""
        pad_single_rows(self.model_runner.get_model())

    def motley_temper(self, temperature: float) -> None:
        """Divide all logits by `temperature` from now on; 1 takes the division away.

        vLLM gives log-probs of prompt tokens from the bare logits, whatever the request's temperature.
        """
        model = self.model_runner.get_model()
        model.__dict__.pop("compute_logits", None)
        if temperature == 1.0:
            return
        bare = model.compute_logits

        def tempered(*arguments: object, **named: object) -> torch.Tensor | None:
            logits: torch.Tensor | None = bare(*arguments, **named)
            return None if logits is None else logits / temperature

        model.compute_logits = tempered


def repack_cpu_linears(model: torch.nn.Module) -> int:
    """Pack again every linear layer that keeps a packed copy of its weight; return how many there are.

    On CPU, linear layers compute with a copy packed for oneDNN. A tied `lm_head` shares its weight with the embedding,
    gets no weight of its own in a reload, and would keep the copy of the old weights without any error.
    """
    packed = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.numel():
            quant_method: Any = module.quant_method
            quant_method.process_weights_after_loading(module)
            packed += 1
    return packed


def pad_single_rows(model: torch.nn.Module) -> None:
    """Let packed linear layers compute a single row as two.

    The kernel for one row rounds differently from the one for several, so a row that is left alone in its batch would
    get other log-probs (by 1e-6, enough to change a token once in a while).
    """
    for module in model.modules():
        linear: Any = getattr(module, "cpu_linear", None)
        if linear is not None and not isinstance(linear, _PaddedLinear):
            module.cpu_linear = _PaddedLinear(linear)


class _PaddedLinear:
    """A packed linear function that never sees fewer than two rows."""

    def __init__(self, linear: Any) -> None:  # noqa: ANN401 - a function of vLLM
        self._linear = linear

    def __call__(self, rows: torch.Tensor, *arguments: object) -> torch.Tensor:
        if rows.ndim != 2 or rows.shape[0] != 1:
            return torch.as_tensor(self._linear(rows, *arguments))
        return torch.as_tensor(self._linear(rows.expand(2, -1).contiguous(), *arguments))[:1]
