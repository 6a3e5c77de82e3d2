"""LoRA adapters of a vLLM engine, by vLLM's own LoRA support: one at a time, on the base that the engine started with.

vLLM adds an adapter's output to that of the layer and merges nothing. With adapters its layers are wrapped, and a
reload of whole weights in place doesn't know the wrapped names; so the base is fixed for the life of the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from stages.engines.adapter_files import validate_adapter
from stages.engines.architecture import unfit_directory
from stages.engines.protocol import AdapterBase
from stages.engines.weight_files import Shapes, weight_files
from stages.errors import EngineError
from stages.spec.execution import LoraSpec
from storage.weights_hash import weights_hash as hash_of

_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""


def adapter_arguments(spec: LoraSpec | None) -> dict[str, object]:
    """Return what vLLM's `LLM` must be told of adapters."""
    if spec is None:
        return {}
    rank = min(rank for rank in _RANKS if rank >= spec.rank)
    return {
        "enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 1,
        # Only these layers are wrapped. Left to itself vLLM wraps the head too, and on CPU its adapted head fails on
        # log-probs of prompt tokens ("subscript b has size ... for operand 1": one index per row, not per token).
        "lora_target_modules": list(spec.target_modules),
    }  # fmt: skip


class VllmAdapters:
    """The adapter that an engine samples with."""

    def __init__(self, llm: Any, model_dir: Path, spec: LoraSpec, shapes: Shapes) -> None:  # noqa: ANN401 - vllm.LLM
        """Begin without one.

        Args:
            llm: vLLM's engine.
            model_dir: Directory that it was started with.
            spec: The adapters it may get.
            shapes: Tensors of the directory.
        """
        self._llm, self._spec, self._shapes = llm, spec, shapes
        # Not taken from a caller: what vLLM read when it started is what lies there.
        self._base_hash = hash_of({path.name: path for path in weight_files(model_dir)})
        self._num_loads = 0
        self.request: Any = None
        """vLLM's request of the adapter; None while the bare base is sampled from."""
        llm.collective_rpc("motley_keep")

    def check(self, directory: Path, weights_hash: str, base: AdapterBase | None) -> None:
        """Raise `EngineError` unless a directory can be loaded."""
        wanted = weights_hash if base is None else base.weights_hash
        if wanted != self._base_hash:
            raise unfit_directory(
                directory,
                f"its base has weights {wanted[:12]}, this engine was started with {self._base_hash[:12]} and vLLM "
                "keeps the base of adapters for good; stop the engine and start it with that base",
            )
        if base is not None:
            validate_adapter(directory, self._spec, self._shapes)

    def load(self, directory: Path, *, is_base: bool) -> None:
        """Put a checked adapter in the place of the one before; or none, for the bare base."""
        from vllm.lora.request import LoRARequest

        before, self.request = self.request, None
        if before is not None:
            self._llm.llm_engine.remove_lora(before.lora_int_id)
        if is_base:
            return
        # vLLM takes an adapter's number for its content, so none is used twice.
        self._num_loads += 1
        request = LoRARequest(f"adapter-{self._num_loads}", self._num_loads, str(directory.absolute()))
        if not self._llm.llm_engine.add_lora(request):
            raise EngineError(f"vLLM did not take the adapter of {directory}", directory=str(directory))
        self.request = request
