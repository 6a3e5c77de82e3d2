"""Processes that play the ranks of one megatron layout after another, so that each layout costs no imports.

The library keeps one layout per process, but a process can hold one after the other. A fork server imports torch and
megatron-core once; what it forks meets over a file store.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import distributed as dist

from stages.engines.megatron.trainer import MegatronSettings, MegatronTrainer
from stages.engines.training.rank_place import RankPlace

_PRELOADED = [
    "tests.helpers.rank_pool",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]
_TIMEOUT_S = 1500.0
"""Longest wait for a layout; a crowded machine is slow."""


@dataclass(frozen=True)
class LayoutJob:
    """Calls of a trainer that all ranks of a layout make together."""

    settings: MegatronSettings
    calls: Sequence[tuple[str, tuple[Any, ...]]]
    """Method and arguments."""


class RankPool:
    """A few processes; use it as a context manager."""

    def __init__(self, num_ranks: int = 4) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._ranks = []
        for _ in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.join(timeout=10)
            if process.is_alive():
                process.kill()

    def run(self, job: LayoutJob) -> list[Any]:
        """Return what rank 0's calls returned; raises what a rank raised, as text."""
        num_ranks = job.settings.layout.num_ranks
        used = self._ranks[:num_ranks]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, connection) in enumerate(used):
                connection.send((job, RankPlace(rank=rank, num_ranks=num_ranks, timeout_s=_TIMEOUT_S), folder))
            answers = []
            for rank, (_, connection) in enumerate(used):
                if not connection.poll(_TIMEOUT_S):
                    raise TimeoutError(f"rank {rank} of {job.settings.layout} says nothing for {_TIMEOUT_S} s")
                answers.append(connection.recv())
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if failures:
            raise RuntimeError(f"{job.settings.layout}\n" + "\n".join(failures))
        return list(answers[0][1])


def _serve(connection: Connection) -> None:
    while True:
        try:
            job, place, folder = connection.recv()
        except EOFError:
            return
        try:
            answer = (None, _run(job, place, folder))
        except BaseException:  # noqa: BLE001 - the test must see whatever it is
            answer = (traceback.format_exc(), [])
        connection.send(answer if place.rank == 0 or answer[0] else (None, []))


def _run(job: LayoutJob, place: RankPlace, folder: str) -> list[Any]:
    store = dist.FileStore(str(Path(folder) / "store"), place.num_ranks)
    trainer = MegatronTrainer(job.settings, place, store)
    try:
        return [getattr(trainer, method)(*arguments) for method, arguments in job.calls]
    finally:
        trainer.close()
