"""Source `reasoning-gym:<task>`: procedural problems of the package `reasoning-gym`.

A row keeps the recipe (task, seed, size, configuration, index), not the entry: the verifier makes the entry again, with
every type that JSON would lose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from stages.data.rows import canonical_json
from stages.data.source import RawRow
from stages.data.spec import DataSpec
from stages.errors import DataError

GYM_METADATA_KEY: Final = "reasoning_gym"
"""Metadata key of the recipe: {task, seed, size, config, index}."""

_DEFAULT_SIZE: Final = 1000


def reasoning_gym_rows(spec: DataSpec, task: str) -> Iterator[RawRow]:
    """`spec.size` (default 1000) problems of the task; problem i depends on (task, config, seed + i) only.

    Raises:
        DataError: The package is missing, the task unknown or its configuration refused.
    """
    size = spec.size or _DEFAULT_SIZE
    recipe: dict[str, Any] = {"task": task, "seed": spec.seed, "size": size, "config": dict(spec.config)}
    dataset = _dataset_of(recipe)
    for index in range(size):
        entry = dataset[index]
        answer = entry["answer"]
        yield RawRow(
            example=None,
            prompt=entry["question"],
            answer=None if answer is None else str(answer),
            metadata={GYM_METADATA_KEY: {**recipe, "index": index}},
            part=entry["metadata"].get("source_dataset"),
        )


def task_entry(recipe: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The task and the entry that a row's recipe describes; the task scores with `score_answer(answer, entry)`."""
    dataset = _dataset_of({key: value for key, value in recipe.items() if key != "index"})
    return dataset, dataset[recipe["index"]]


def _dataset_of(recipe: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a class of an optional package
    return _cached_dataset(recipe["task"], recipe["seed"], recipe["size"], canonical_json(recipe["config"]))


@lru_cache(maxsize=8)
def _cached_dataset(task: str, seed: int, size: int, config_json: str) -> Any:  # noqa: ANN401 - as above
    import json

    try:
        # Imported here: an optional package, and slow.
        import reasoning_gym
    except ImportError as error:
        raise DataError(f"data.source reasoning-gym:{task} needs the package reasoning-gym: {error}") from error
    try:
        config = json.loads(config_json)
        if task == "composite":
            config = _composite_config(config)
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **config)
    except (ValueError, TypeError, AssertionError) as error:
        # The package checks its configuration by assertions.
        raise DataError(
            f"data.source reasoning-gym:{task} with config {config_json} is refused by the package: "
            f"{type(error).__name__}: {error}"
        ) from error


def _composite_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a weighted mixture with the value type that the package wants for its `datasets`."""
    from reasoning_gym.composite import DatasetSpec

    return {**config, "datasets": [DatasetSpec(**part) for part in config.get("datasets", [])]}
