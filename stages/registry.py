"""Which module does which stage; modules are imported when their stage runs, so that start-up stays light."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Final, cast

from stages.context import StageContext, StageOutcome
from stages.contract import StageName

StageFunction = Callable[[StageContext], StageOutcome]
"""What a stage module exports as `run_stage`."""

STAGE_MODULES: Final[Mapping[StageName, str]] = {
    StageName.PREPARE: "stages.prepare",
    StageName.PROFILE: "stages.profile",
    StageName.PLAN: "stages.plan",
    StageName.GENERATE: "stages.generate",
    StageName.INFER: "stages.infer",
    StageName.REWARD_INFERENCE: "stages.reward_inference",
    StageName.REFERENCE_INFERENCE: "stages.reference_inference",
    StageName.CRITIC_INFERENCE: "stages.critic_inference",
    StageName.TRAIN: "stages.train",
    StageName.CRITIC_TRAINING: "stages.critic_training",
    StageName.COMMIT_POLICY: "stages.commit_policy",
    StageName.WEIGHT_SYNC: "stages.weight_sync",
    StageName.EVALUATE: "stages.evaluate",
    StageName.REPORT: "stages.report",
    StageName.REPLICATE: "stages.replicate",
}
"""Module by stage."""


def stage_function(name: StageName) -> StageFunction:
    """Return the function that does a stage's work."""
    return cast("StageFunction", importlib.import_module(STAGE_MODULES[name]).run_stage)
