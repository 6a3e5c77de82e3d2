"""Rows of one prompt share its tokens, and nothing of the result changes by it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the engines' environment")

from stages.engines.protocol import ScoredTokens  # noqa: E402 - torch checked first
from stages.engines.training.policy_module import PolicyModule, load_policy_module  # noqa: E402 - torch checked first
from stages.engines.training.row_tensors import make_row_tensors  # noqa: E402 - torch checked first
from tests.helpers.tiny_models import save_tiny_model  # noqa: E402 - torch checked first

pytestmark = pytest.mark.engines
CPU = torch.device("cpu")
ROWS = [
    ScoredTokens(prompt_token_ids=prompt, completion_token_ids=completion)
    for prompt, completion in (([1, 5, 6], [7, 8, 9]), ([1, 4], [3]), ([1, 5, 6], [9, 2]))
]


def load(model_dir: Path) -> PolicyModule:
    return load_policy_module(model_dir, dtype=torch.float32, is_recomputing=False, chunk_tokens=4, device=CPU)


def test_equal_prompts_stand_once_in_the_flat_sequence() -> None:
    tensors = make_row_tensors(ROWS, CPU)
    assert tensors.token_ids.tolist() == [1, 5, 6, 7, 8, 1, 4, 9]
    assert tensors.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 3]
    assert tensors.row_places.tolist() == [[0, 1, 2, 3, 4], [5, 6, 0, 0, 0], [0, 1, 2, 7, 0]]
    assert tensors.token_owners.tolist() == [0, 1, 2, 3, 4, 5, 6, 13]
    assert tensors.hidden_index.tolist() == [2, 3, 4, 6, 12, 13]
    assert tensors.targets.tolist() == [7, 8, 9, 3, 9, 2]


def test_logprobs_and_gradients_of_shared_prompts_equal_those_of_separate_rows(tmp_path: Path) -> None:
    module = load(save_tiny_model(tmp_path / "model", scale=1.0))
    assert module.shares_prompts
    weights = torch.linspace(-1, 1, 6)
    results = []
    for parts in ([ROWS], [[row] for row in ROWS]):
        tensors = [make_row_tensors(part, CPU) for part in parts]
        logprobs = torch.cat([module(*part.inputs(), False)[0] for part in tensors])
        (logprobs * weights).sum().backward()
        results.append([logprobs.detach(), *(parameter.grad for parameter in module.parameters())])
        module.zero_grad()
    for shared, separate in zip(*results, strict=True):
        torch.testing.assert_close(shared, separate, rtol=1e-4, atol=1e-5)


def test_padded_rows_of_other_families_give_the_same(tmp_path: Path) -> None:
    module = load(save_tiny_model(tmp_path / "model", scale=1.0))
    tensors = make_row_tensors(ROWS, CPU)
    shared = module(*tensors.inputs(), True)
    module.shares_prompts = False
    for ours, padded in zip(shared, module(*tensors.inputs(), True), strict=True):
        torch.testing.assert_close(ours, padded, rtol=1e-4, atol=1e-5)
