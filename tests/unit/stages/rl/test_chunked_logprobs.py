"""Chunked log-probs against the plain computation."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stages.rl.chunked_logprobs import chunked_logprobs  # noqa: E402 - torch checked first

pytestmark = pytest.mark.engines


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 6, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(13, 6, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 13, (11,), generator=generator)
    temperature = 0.5 + torch.rand(11, generator=generator)
    return hidden, weight, targets, temperature


def naive(hidden, weight, targets, temperature, softcap=None):
    logits = (hidden @ weight.T).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_softmax = torch.log_softmax(logits / temperature.unsqueeze(-1), -1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 64])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_chunked_logprobs_and_gradients_equal_the_plain_ones(chunk_tokens: int, softcap: float | None) -> None:
    hidden, weight, targets, temperature = inputs()
    logprobs, entropy = chunked_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        logit_softcap=softcap,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
    )
    scale = torch.linspace(-1, 1, 11)
    (scale * logprobs - 0.3 * entropy).sum().backward()
    ours = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    expected_logprobs, expected_entropy = naive(hidden, weight, targets, temperature, softcap)
    (scale * expected_logprobs - 0.3 * expected_entropy).sum().backward()
    torch.testing.assert_close(logprobs, expected_logprobs)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(ours[0], hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[1], weight.grad, rtol=1e-5, atol=1e-6)


def test_l1_l2_temperature_divides_logits_not_logprobs() -> None:
    hidden, weight, targets, _ = inputs()
    tempered, _ = chunked_logprobs(hidden, weight, targets, temperature=0.6)
    plain, _ = chunked_logprobs(hidden, weight, targets)
    expected, _ = naive(hidden, weight, targets, torch.full((11,), 0.6))
    torch.testing.assert_close(tempered, expected)
    assert (tempered - plain / 0.6).abs().max() > 0.1
    # A tempered distribution still sums to 1 over the vocabulary; scaled log-probs don't.
    everywhere, _ = chunked_logprobs(hidden[:1].expand(13, 6), weight, torch.arange(13), temperature=0.6)
    torch.testing.assert_close(everywhere.exp().sum(), torch.tensor(1.0))


def test_l6_each_row_uses_its_own_temperature() -> None:
    hidden, weight, targets, _ = inputs()
    temperature = torch.tensor([0.5] * 5 + [2.0] * 6)
    logprobs, _ = chunked_logprobs(hidden, weight, targets, temperature=temperature, chunk_tokens=3)
    cold, _ = chunked_logprobs(hidden[:5], weight, targets[:5], temperature=0.5)
    hot, _ = chunked_logprobs(hidden[5:], weight, targets[5:], temperature=2.0)
    torch.testing.assert_close(logprobs, torch.cat([cold, hot]))


def test_chunked_logprobs_of_bf16_states_are_fp32() -> None:
    hidden, weight, targets, _ = inputs(torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk_tokens=4, with_entropy=True)
    logprobs.sum().backward()
    assert (logprobs.dtype, entropy.dtype, hidden.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)


def test_head_bias_gets_its_gradient() -> None:
    hidden, weight, targets, temperature = inputs()
    bias = torch.linspace(-1, 1, 13).requires_grad_()
    chunked_logprobs(hidden, weight, targets, head_bias=bias, temperature=temperature, chunk_tokens=4)[
        0
    ].sum().backward()
    ours = bias.grad.clone()
    bias.grad = None
    log_softmax = torch.log_softmax((hidden @ weight.T + bias) / temperature.unsqueeze(-1), -1)
    log_softmax.gather(-1, targets.unsqueeze(-1)).sum().backward()
    torch.testing.assert_close(ours, bias.grad)


def test_under_autocast_the_product_runs_in_its_dtype_forward_and_backward() -> None:
    hidden, weight, targets, _ = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = chunked_logprobs(hidden, weight, targets, chunk_tokens=4)
    logprobs.sum().backward()
    plain_hidden, plain_weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    expected, _ = chunked_logprobs(plain_hidden, plain_weight, targets, chunk_tokens=4)
    expected.sum().backward()
    assert torch.equal(logprobs, expected)
    assert hidden.grad.dtype == torch.float32
    assert torch.equal(hidden.grad, plain_hidden.grad.float())


def test_extreme_logits_stay_finite_forward_and_backward() -> None:
    hidden = torch.tensor([[1e4, -1e4]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], requires_grad=True)
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.tensor([1]), with_entropy=True)
    (logprobs + entropy).sum().backward()
    assert (logprobs.item(), entropy.item()) == (-2e4, 0.0)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_chunked_logprobs_of_no_tokens_are_empty() -> None:
    _, weight, _, _ = inputs()
    logprobs, entropy = chunked_logprobs(torch.zeros(0, 6), weight, torch.zeros(0, dtype=torch.long), with_entropy=True)
    assert (logprobs.shape, entropy.shape) == ((0,), (0,))


def test_logits_of_the_whole_batch_never_exist_at_once() -> None:
    hidden, weight, targets, _ = inputs()
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    with Watch():
        logprobs, _ = chunked_logprobs(hidden, weight, targets, chunk_tokens=2)
        logprobs.sum().backward()
    # Largest tensor: the head weight's gradient (13 * 6) against 11 * 13 logits.
    assert max(sizes) == 13 * 6
