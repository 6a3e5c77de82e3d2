"""What lets megatron-core 0.16.1 run on CPU over gloo. On CUDA nothing of it is active.

The library names the device `cuda` in its schedules, buffers and optimizer, whatever backend the process group has. The
shim holds within a block and undoes everything at its end:

- tensors asked for on `cuda` are made on `cpu`, and `Tensor.cuda` and `Tensor.to("cuda")` leave them there;
- `Tensor.type()` of a CPU tensor says `torch.cuda.FloatTensor`, which the distributed optimizer compares with;
- `torch.cuda.current_device`, `synchronize` and `empty_cache` answer for the CPU;
- states of the CUDA random generators are nothing: dropout is off, so no random number is drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

from stages.engines.megatron.replacing import replaced


@contextlib.contextmanager
def megatron_on(device: str) -> Iterator[None]:
    """Let megatron-core run on a device within the block.

    Args:
        device: `cpu` or `cuda`; on `cuda` the block is an ordinary one.
    """
    if device == "cuda":
        yield
        return
    tracker = megatron_random.CudaRNGStatesTracker
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "synchronize", _nothing),
            (torch.cuda, "empty_cache", _nothing),
            (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0)),
            (megatron_random, "_set_cuda_rng_state", _nothing),
            (tracker, "fork", lambda *_, **__: contextlib.nullcontext()),
        ):
            stack.enter_context(replaced(owner, name, replacement))
        stack.enter_context(_CpuForCuda())
        yield


class _CpuForCuda(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
    """Reads `cuda` as `cpu` in every call of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - torch's protocol
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:  # noqa: ANN401 - anything that torch takes for a device
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _nothing(*_: Any, **__: Any) -> None:  # noqa: ANN401 - takes what the replaced function takes
    return None
