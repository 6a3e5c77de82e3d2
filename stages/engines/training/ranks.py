"""How the ranks of an engine meet, and the accelerate set-up of one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import distributed as dist

from stages.engines.training.rank_group import RankGroup
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


class Ranks(RankGroup):
    """The data-parallel ranks of one engine on accelerate, seen from one of them."""

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
            join_process_group(place, device, store)
        with _rank_environment(place):
            self.accelerator = Accelerator(cpu=device == "cpu", mixed_precision=mixed_precision)
        super().__init__(place.rank, place.num_ranks, self.accelerator.device)

    def close(self) -> None:
        """Leave the process group and forget accelerate's state, so that another engine can be made."""
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if self.place.num_ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_process_group(place: RankPlace, device: str, store: Any) -> None:  # noqa: ANN401 - TCPStore is untyped
    """Make torch's default process group: gloo on CPU, NCCL on CUDA.

    Args:
        place: This rank.
        device: `cpu` or `cuda`.
        store: The store that rank 0 made; None = connect to its port.
    """
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
