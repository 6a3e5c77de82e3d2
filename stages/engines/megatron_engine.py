"""Training engine on megatron-core: tensor, pipeline and data parallel; also scores rows."""

from __future__ import annotations

from pathlib import Path

from stages.engines.launch import EngineLaunch
from stages.engines.megatron.options import MegatronOptions, megatron_settings
from stages.engines.training.engine_options import parse_options
from stages.engines.training.policy_engine import PolicyEngine
from stages.engines.training.ranked_engine import RanksWanted


class MegatronEngine(PolicyEngine):
    """Each rank has a tensor shard of a pipeline stage of a replica, on the plan's device for it."""

    kind = "split_policy"
    name = "megatron"
    distribution = "megatron-core"

    def _ranks_wanted(self, launch: EngineLaunch, model_dir: Path) -> RanksWanted:
        options = parse_options(launch, MegatronOptions)
        settings = megatron_settings(launch, options, model_dir)
        return RanksWanted(settings=settings, num_ranks=settings.layout.num_ranks, timeout_s=options.rank_timeout_s)
