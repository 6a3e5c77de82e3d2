"""Motley's additions to vLLM's worker, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")

import torch

from stages.engines.vllm_extension import PolicyWorker, pad_single_rows, repack_cpu_linears

pytestmark = pytest.mark.engines


class PackingMethod:
    """Packs like vLLM's CPU layers: the function holds a copy of the weight."""

    def process_weights_after_loading(self, module: Any) -> None:
        packed = module.weight.detach().clone()
        module.cpu_linear = lambda rows, weight, bias: (rows @ packed.T) * (1 if rows.shape[0] == 1 else 2)


def packed_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.ReLU())
    model[0].quant_method = PackingMethod()
    model[0].quant_method.process_weights_after_loading(model[0])
    return model


def test_repack_follows_the_weight() -> None:
    """[W3, W5] A packed copy of old weights doesn't survive."""
    model = packed_model()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
    assert repack_cpu_linears(model) == 1
    rows = torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    assert torch.equal(model[0].cpu_linear(rows, None, None), 2 * rows)


def test_single_row_is_computed_by_the_kernel_for_several() -> None:
    model = packed_model()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
    repack_cpu_linears(model)
    pad_single_rows(model)
    pad_single_rows(model)
    assert model[0].cpu_linear(torch.tensor([[3.0, 4.0]]), None, None).tolist() == [[6.0, 8.0]]
    assert model[0].cpu_linear(torch.tensor([[3.0, 4.0]] * 3), None, None).tolist() == [[6.0, 8.0]] * 3


def test_temper_divides_logits_until_it_is_taken_away() -> None:
    """[L1, L2] Scores at a temperature divide the logits, not the log-probs."""

    class Head(torch.nn.Module):
        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    class Runner:
        def __init__(self) -> None:
            self.model = Head()

        def get_model(self) -> Head:
            return self.model

    worker = PolicyWorker()
    worker.model_runner = Runner()
    hidden = torch.tensor([1.0, 2.0])
    seen = []
    for temperature in (0.5, 2.0, 1.0):
        worker.motley_temper(temperature)
        seen.append(worker.model_runner.get_model().compute_logits(hidden).tolist())
    assert seen == [[2.0, 4.0], [0.5, 1.0], [1.0, 2.0]]
