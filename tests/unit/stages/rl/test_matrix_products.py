"""Products by oneDNN against torch's own, and their gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stages.rl.matrix_products import ProductLinear, linear, product, use_products_in  # noqa: E402 - torch checked first

pytestmark = pytest.mark.engines


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_product_of_plain_and_transposed_matrices_equals_torch(rows: int) -> None:
    left, right = numbers(rows, 24), numbers(24, 40, seed=1)
    expected = left @ right
    torch.testing.assert_close(product(left, right), expected)
    torch.testing.assert_close(product(left.t().contiguous().t(), right), expected)
    torch.testing.assert_close(product(left, right.t().contiguous().t()), expected)


def test_product_in_other_dtypes_is_torchs_own() -> None:
    left, right = numbers(5, 24).bfloat16(), numbers(24, 8).bfloat16()
    assert torch.equal(product(left, right), left @ right)


@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_and_its_gradients_equal_torch(has_bias: bool) -> None:
    inputs, weight, bias = numbers(2, 5, 24), numbers(40, 24, seed=1), numbers(40, seed=2)
    gradients = []
    for function in (linear, torch.nn.functional.linear):
        leaves = [value.clone().requires_grad_() for value in (inputs, weight, bias)]
        output = function(leaves[0], leaves[1], leaves[2] if has_bias else None)
        output.square().sum().backward()
        gradients.append([output.detach(), *(leaf.grad for leaf in leaves[: 2 + has_bias])])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)


def test_linear_under_autocast_runs_in_its_dtype() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(numbers(3, 24), numbers(8, 24), None).dtype == torch.bfloat16


def test_layers_keep_names_and_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(24, 8), torch.nn.ReLU())
    inputs, before = numbers(3, 24), dict(model.state_dict())
    expected = model(inputs)
    use_products_in(model)
    assert type(model[0]) is ProductLinear
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == {
        name: value.data_ptr() for name, value in before.items()
    }
    torch.testing.assert_close(model(inputs), expected)
