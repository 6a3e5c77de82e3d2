"""Options of the megatron engine and the settings of its ranks."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from stages.engines.launch import EngineLaunch
from stages.engines.megatron.layout import MegatronLayout, layout_faults
from stages.engines.megatron.model_config import read_model_config
from stages.engines.megatron.trainer import MegatronSettings
from stages.engines.training.engine_options import TrainerOptions, settings_of
from stages.errors import SpecFaultsError


class MegatronOptions(TrainerOptions):
    """What the options of the megatron engine's launch may hold; the degrees come from the plan."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Tensor shards of a pipeline stage."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage; absent = one stage with all of them."""
    replica_samples: tuple[int, ...] = (1,)
    """Samples of each replica in the plan: rows are dealt out in proportion, longer ones to larger shares."""
    sequence_parallel: bool = False
    """Whether norms run on a part of the sequence per tensor shard, which saves activations."""

    @field_validator("stage_layers", "replica_samples", mode="before")
    @classmethod
    def _take_lists(cls, value: Any) -> Any:  # noqa: ANN401 - input of any type, as pydantic hands it over
        return tuple(value) if isinstance(value, list) else value


def megatron_settings(launch: EngineLaunch, options: MegatronOptions, model_dir: Path) -> MegatronSettings:
    """Return the settings of every rank.

    Raises:
        SpecFaultsError: The model can't be split so, or the launch has another number of GPUs; lists every fault.
        EngineError: The model is of a family that the engine doesn't take.
        EngineUnavailableError: The launch names GPUs and torch sees none.
    """
    model = read_model_config(model_dir)
    layout = MegatronLayout(
        tp=options.tensor_parallel, stage_layers=options.stage_layers or (model.layers,), shares=options.replica_samples
    )
    faults = layout_faults(
        layout, layers=model.layers, heads=model.heads, kv_heads=model.kv_heads, intermediate=model.intermediate
    )
    if min(layout.shares, default=0) < 1:
        faults.append(f"replica_samples {list(layout.shares)} must name at least one replica, each with 1 or more")
    here = layout.num_ranks if launch.gang is None else len(launch.gang.ranks_of(launch.machine))
    if launch.gpus and len(launch.gpus) != here:
        faults.append(
            f"{here} of {layout.num_ranks} ranks ({layout.dp} replicas x {layout.pp} stages x {layout.tp} shards) are "
            f"here and need as many GPUs, the engine has {len(launch.gpus)}"
        )
    if options.precision == "bf16":
        faults.append("precision bf16 (no fp32 copy of the weights) is not supported, use bf16-mixed or fp32")
    if faults:
        raise SpecFaultsError("the launch of the megatron engine", faults)
    common = settings_of(launch, options, model_dir)
    return MegatronSettings(
        **{field.name: getattr(common, field.name) for field in fields(common)},
        layout=layout,
        sequence_parallel=options.sequence_parallel,
    )
