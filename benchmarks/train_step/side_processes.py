"""The processes of a side, which sleep while another side works."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from benchmarks.step_vs_trl.clock import Seconds
from benchmarks.train_step.cases import CASES, Case
from benchmarks.train_step.plain_loop import PlainLoop
from benchmarks.train_step.sides import Side
from stages.engines.launch import EngineLaunch
from stages.engines.protocol import TrainingRequest
from stages.engines.registry import engine_factory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One optimizer step of a side."""

    seconds: Seconds
    """Of the wall, and of the CPU over all processes of the side."""
    loss: float
    grad_norm: float


class SideProcesses:
    """A side that makes a step when it is told to; a context manager."""

    def __init__(self, side: Side, case: Case, model_dir: Path, folder: Path, threads: int) -> None:
        self.side = side
        context = multiprocessing.get_context("spawn")
        self._ranks: list[tuple[Any, Connection]] = []
        # Motley's engines start their other ranks themselves.
        for rank in range(side.num_processes if side.kind == "plain" else 1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, side, case.name, model_dir, folder / side.name, rank, threads)
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for _, connection in self._ranks:
            connection.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            process.join(timeout=60)
            if process.is_alive():
                process.kill()

    def step(self) -> StepDone:
        """Make one optimizer step."""
        cpu_s, started_at = self._cpu_s(), time.perf_counter()
        for _, connection in self._ranks:
            connection.send("step")
        answers = [connection.recv() for _, connection in self._ranks]
        wall_s = time.perf_counter() - started_at
        loss, grad_norm = answers[0]
        seconds = Seconds(wall_s=wall_s, cpu_s=self._cpu_s() - cpu_s)
        return StepDone(seconds=seconds, loss=loss, grad_norm=grad_norm)

    def _cpu_s(self) -> float:
        return tree_cpu_s([process.pid for process, _ in self._ranks])


def tree_cpu_s(pids: Iterable[int | None]) -> float:
    """Return the CPU seconds of processes and their descendants, user and system; the kernel counts in hundredths."""
    roots = [psutil.Process(pid) for pid in pids]
    times = [each.cpu_times() for root in roots for each in (root, *root.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _serve(
    connection: Connection, side: Side, case_name: str, model_dir: Path, meeting: Path, rank: int, threads: int
) -> None:
    """Be a rank of a plain loop, or the engine of another side, until the connection is closed."""
    torch.set_num_threads(threads)
    case = CASES[case_name]
    request = case.request()
    trainer: Any = (
        PlainLoop(model_dir, rank, side.num_processes, meeting)
        if side.kind == "plain"
        else EngineSteps(side, case, model_dir, threads)
    )
    connection.send("ready")
    while True:
        try:
            connection.recv()
        except EOFError:
            break
        connection.send(trainer.step(request))
    if isinstance(trainer, EngineSteps):
        trainer.close()


class EngineSteps:
    """Steps of one of Motley's engines."""

    def __init__(self, side: Side, case: Case, model_dir: Path, threads: int) -> None:
        launch = EngineLaunch(
            role="training", name=side.kind, run="benchmark", machine="here", threads=threads, dtype="fp32",
            max_prompt_tokens=case.prompt_tokens[1], max_completion_tokens=case.completion_tokens[1],
            options=side.engine_options(case.shape),
        )  # fmt: skip
        self._engine: Any = engine_factory("training", side.kind)(launch, model_dir)
        self._engine.load_checkpoint(model_dir, None, 0, "start")

    def step(self, request: TrainingRequest) -> tuple[float, float]:
        """Make one optimizer step; return loss and gradient norm."""
        values = self._engine.train(request).steps[0].values
        return values["loss"], values["grad_norm"]

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
