"""Sums and maxima over ranks, and the accelerate set-up of one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch import distributed as dist

from stages.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank this process is, and where the ranks meet."""

    rank: int = 0
    """Rank 0 is the process of the engine."""
    num_ranks: int = 1
    """Number of ranks, all on this machine."""
    port: int = 0
    """Port on 127.0.0.1 of the ranks' store; 0 with one rank."""
    timeout_s: float = 1800.0
    """Longest wait for another rank in one collective."""


class Ranks:
    """The ranks of one engine, seen from one of them. With one rank every reduction is the identity."""

    def __init__(self, place: RankPlace, *, device: str, mixed_precision: str, store: Any = None) -> None:  # noqa: ANN401
        """Join the process group, if there is one, and set accelerate up.

        Args:
            place: This rank.
            device: `cpu` or `cuda`.
            mixed_precision: accelerate's `no` or `bf16`.
            store: The `TCPStore` that rank 0 made; the others connect to its port.

        Raises:
            EngineError: Another engine with another precision lives in this process.
        """
        self.place = place
        if AcceleratorState._shared_state:
            raise EngineError(
                "this process holds a training engine already and accelerate keeps one state per process: "
                "close the other engine first, or use another process"
            )
        if place.num_ranks > 1:
            _join_process_group(place, device, store)
        with _rank_environment(place):
            self.accelerator = Accelerator(cpu=device == "cpu", mixed_precision=mixed_precision)
        self.device: torch.device = self.accelerator.device

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, elementwise, in place."""
        if self.place.num_ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks."""
        return [float(value) for value in self.sum(self._float64(values)).tolist()]

    def sum_mapping(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over ranks by name; all ranks have the same names."""
        names = sorted(values)
        return dict(zip(names, self.sum_floats([values[name] for name in names]), strict=True))

    def max_floats(self, values: Sequence[float]) -> list[float]:
        """Maxima over ranks."""
        tensor = self._float64(values)
        if self.place.num_ranks > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.place.num_ranks > 1:
            self.sum_floats([1.0])

    def close(self) -> None:
        """Leave the process group and forget accelerate's state, so that another engine can be made."""
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if self.place.num_ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _float64(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64, device=self.device)


def _join_process_group(place: RankPlace, device: str, store: Any) -> None:  # noqa: ANN401 - TCPStore is untyped
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    timeout = timedelta(seconds=place.timeout_s)
    if store is None:
        store = dist.TCPStore("127.0.0.1", place.port, place.num_ranks, is_master=False, timeout=timeout)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.num_ranks, timeout=timeout)


def _loopback_interface() -> str:
    """Name of the interface of 127.0.0.1: gloo would else look the host's own name up, which need not resolve."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise EngineError("no network interface has the address 127.0.0.1, over which training ranks talk to each other")


@contextmanager
def _rank_environment(place: RankPlace) -> Iterator[None]:
    """What torchrun sets and accelerate reads, for the time of accelerate's set-up only."""
    if place.num_ranks == 1:
        # A launcher's variables around the engine would make accelerate wait for ranks that don't exist.
        wanted: dict[str, str | None] = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    else:
        rank, size = str(place.rank), str(place.num_ranks)
        wanted = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }  # fmt: skip
    before = {name: os.environ.get(name) for name in wanted}
    _set_environment(wanted)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
