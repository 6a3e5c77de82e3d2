"""Engines by role and name; the modules behind the names are imported only when an engine is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from stages.engines.launch import EngineLaunch, Role
from stages.engines.protocol import Engine
from stages.errors import EngineError

EngineFactory = Callable[[EngineLaunch, Path], Engine]
"""Builds an engine for the architecture found in a model directory."""

_FACTORIES: Mapping[Role, Mapping[str, str]] = {
    "generation": {
        "transformers": "stages.engines.transformers_engine:TransformersEngine",
        "vllm": "stages.engines.vllm_engine:VllmEngine",
    },
    "scoring": {
        "transformers": "stages.engines.transformers_engine:TransformersEngine",
    },
    "training": {
        "accelerate": "stages.engines.accelerate_engine:AccelerateEngine",
        "megatron": "stages.engines.megatron_engine:MegatronEngine",
    },
    "critic": {
        "accelerate": "stages.engines.accelerate_critic:AccelerateCritic",
    },
    "reward": {
        "transformers": "stages.engines.reward_engine:TransformersRewardEngine",
    },
}


def engine_names(role: Role) -> tuple[str, ...]:
    """Return the names of the engines that can take `role`, in registration order."""
    return tuple(_FACTORIES[role])


def engine_factory(role: Role, name: str) -> EngineFactory:
    """Import and return the factory of an engine.

    Raises:
        EngineError: The role has no such engine, or the environment lacks its library.
    """
    target = _FACTORIES[role].get(name)
    if target is None:
        known = ", ".join(engine_names(role))
        raise EngineError(f"no {role} engine is called {name!r}; choose one of: {known}", role=role, name=name)
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EngineError(
            f"{role} engine {name!r} can't be imported in this environment ({error}); install Motley's extra for it",
            role=role,
            name=name,
        ) from error
    return cast("EngineFactory", getattr(module, attribute))
