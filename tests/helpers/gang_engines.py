"""The engines of a gang as processes of this machine: each "machine" has a state directory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from stages.engines.client import RemoteEngine
from stages.engines.gang_place import GangPlace
from stages.engines.launch import EngineLaunch
from stages.engines.manager import EngineManager
from tests.helpers.loopback import free_port

START_S = 900.0
"""Longest start; a crowded machine is slow."""


def gang_place(ranks: Sequence[Sequence[int]], *, token: str = "gang", port: int | None = None) -> GangPlace:
    """Return the place of engines on machines m0, m1, ... with these ranks."""
    return GangPlace(
        token=token, machines=tuple(f"m{index}" for index in range(len(ranks))),
        ranks=tuple(tuple(each) for each in ranks), host="127.0.0.1", port=port or free_port(), address="127.0.0.1",
    )  # fmt: skip


class GangEngines:
    """Started together; a context manager that ends them."""

    def __init__(self, base: Path, launch: EngineLaunch, model_dir: Path, ranks: Sequence[Sequence[int]]) -> None:
        self.place = gang_place(ranks)
        self.managers = [EngineManager(base / machine) for machine in self.place.machines]
        launches = [
            launch.model_copy(update={"machine": machine, "gang": self.place}) for machine in self.place.machines
        ]
        with ThreadPoolExecutor(len(ranks)) as pool:
            self.engines: list[RemoteEngine] = list(
                pool.map(
                    lambda pair: pair[0].acquire(pair[1], model_dir, START_S, START_S),
                    zip(self.managers, launches, strict=True),
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            engine.close()
        for manager in self.managers:
            manager.stop_all()

    def each(self, call: Callable[[RemoteEngine, int], Any]) -> list[Any]:
        """Make a call on all machines at once; return results, or the exceptions in their place."""

        def attempt(index: int) -> Any:
            try:
                return call(self.engines[index], index)
            except Exception as error:  # noqa: BLE001 - the test looks at whatever it is
                return error

        with ThreadPoolExecutor(len(self.engines)) as pool:
            return list(pool.map(attempt, range(len(self.engines))))
