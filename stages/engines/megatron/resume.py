"""Model directories and resume points of a layout: every stage reads and writes its own tensors.

Names and shapes in the files are those of the Hugging Face model, so a point that one layout wrote is read by any
other, and by the accelerate engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.engines.megatron.layout import MegatronLayout, RankCoordinates
from stages.engines.megatron.model_config import ModelConfig
from stages.engines.megatron.sharded_adam import MOMENTS, ShardedAdam
from stages.engines.megatron.weight_io import TensorFiles, collected, local_tensor, write_index
from stages.engines.megatron.weight_map import MappedParameter, stage_parameters
from stages.engines.training.policy_files import copy_source_files
from stages.engines.training.rank_group import RankGroup
from stages.engines.training.resume_point import (
    TrainerCounts,
    read_trainer_counts,
    tensor_file_name,
    tensor_files,
    write_trainer_document,
)
from stages.engines.weight_files import weight_files

Parameters = Mapping[str, nn.Parameter]
"""A rank's parameters by megatron-core's names."""


class LayoutFiles:
    """Reads and writes the files of one rank's part of the model."""

    def __init__(
        self, config: ModelConfig, layout: MegatronLayout, at: RankCoordinates, ranks: RankGroup, source_dir: Path
    ) -> None:
        self._config, self._layout, self._at, self._ranks = config, layout, at, ranks
        self._source_dir = source_dir
        self._mapped = stage_parameters(config, layout, at.stage)

    def read_weights(self, directory: Path, parameters: Parameters) -> None:
        """Replace every weight in place; the caller has validated names and shapes of the directory."""
        with TensorFiles(weight_files(directory)) as files, torch.no_grad():
            for mapped in self._mapped:
                parameters[mapped.name].copy_(self._local(files, mapped))

    def read_trainer(self, directory: Path, parameters: Parameters, optimizer: ShardedAdam) -> TrainerCounts:
        """Restore the optimizer (and weights, if they are there) and return the counts.

        Raises:
            ContractError: Another format, another model, or missing files.
        """
        counts = read_trainer_counts(directory, self._config.hash)
        weights = tensor_files(directory, "weights", may_be_absent=True)
        with TensorFiles(tensor_files(directory, "optimizer")) as moments, TensorFiles(weights) as full:
            for mapped in self._mapped:
                parameter = parameters[mapped.name]
                if f"step/{mapped.sources[0]}" in moments:
                    values = {name: self._local(moments, mapped, f"{name}/") for name in MOMENTS}
                    optimizer.set_state(parameter, values, moments.whole(f"step/{mapped.sources[0]}"))
                if mapped.sources[0] in full:
                    value = self._local(full, mapped)
                    with torch.no_grad():
                        parameter.copy_(value)
                    optimizer.set_main_weight(parameter, value)
        return counts

    def write_weights(
        self, directory: Path, parameters: Parameters, optimizer: ShardedAdam, dtype: torch.dtype
    ) -> None:
        """Write a serving directory: tensors, index, config, tokenizer."""
        self._write(
            directory, "model", lambda mapped: {"": optimizer.main_weight(parameters[mapped.name])}, dtype
        )  # fmt: skip
        if self._ranks.rank == 0:
            copy_source_files(self._source_dir, directory)
            config = json.loads((self._source_dir / "config.json").read_text(encoding="utf-8"))
            config.pop("torch_dtype", None)
            config["dtype"] = str(dtype).removeprefix("torch.")
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (directory / "config.json").write_text(text, encoding="utf-8")
            if self._layout.pp > 1:
                write_index(self._config, self._layout, directory, dtype)

    def write_trainer(
        self, directory: Path, parameters: Parameters, optimizer: ShardedAdam, counts: TrainerCounts, *,
        has_weights: bool, policy_version: int,
    ) -> None:  # fmt: skip
        """Write everything of a resume point but the random states."""
        has_state = optimizer.has_state

        def moments_of(mapped: MappedParameter) -> dict[str, Tensor]:
            return optimizer.state_of(parameters[mapped.name]) if has_state else {}

        self._write(directory, "optimizer", moments_of, torch.float32)
        if has_weights:
            self._write(
                directory, "weights", lambda mapped: {"": optimizer.main_weight(parameters[mapped.name])}, torch.float32
            )
        if self._ranks.rank == 0:
            write_trainer_document(
                directory, counts, model_config_hash=self._config.hash, num_ranks=self._layout.num_ranks,
                policy_version=policy_version,
            )  # fmt: skip

    def _local(self, files: TensorFiles, mapped: MappedParameter, prefix: str = "") -> Tensor:
        return local_tensor(files, mapped, self._config, self._at.shard, self._layout.tp, prefix)

    def _write(
        self, directory: Path, stem: str, values_of: Callable[[MappedParameter], dict[str, Tensor]], dtype: torch.dtype
    ) -> None:
        """Write one file of this stage; `values_of` gives tensors by kind, "" for weights.

        All replicas call `values_of`, since each may hold a part; the first one's shards collect and write.
        """
        tensors: dict[str, Tensor] = {}
        for mapped in self._mapped:
            for kind, value in values_of(mapped).items():
                if self._at.replica > 0 or mapped.is_copy:
                    continue
                tensors.update(self._collected(mapped, kind, value, dtype))
        if self._at.replica == 0 and self._at.shard == 0:
            path = directory / tensor_file_name(stem, self._at.stage, self._layout.pp)
            save_file(tensors, path, metadata={"format": "pt"})

    def _collected(self, mapped: MappedParameter, kind: str, value: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        prefix = f"{kind}/" if kind else ""
        if kind == "step":
            return {f"{prefix}{name}": value.cpu().clone() for name in mapped.sources}
        group = parallel_state.get_tensor_model_parallel_group()
        found = collected(mapped, value, self._config, group, self._layout.tp)
        return {f"{prefix}{name}": tensor.to(dtype) for name, tensor in found}
