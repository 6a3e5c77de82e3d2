"""How the ranks of an engine meet, and the accelerate set-up of one rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import distributed as dist

from stages.engines.training.rank_group import RankGroup
from stages.engines.training.rank_place import RankPlace
from stages.engines.training.rank_store import join_store
from stages.errors import EngineError


class Ranks(RankGroup):
    """The data-parallel ranks of one engine on accelerate, seen from one of them."""

    def __init__(self, place: RankPlace, *, device: str, mixed_precision: str, store: Any = None) -> None:  # noqa: ANN401
        """Join the process group, if there is one, and set accelerate up.

        Args:
            place: This rank.
            device: `cpu` or `cuda`.
            mixed_precision: accelerate's `no` or `bf16`.
            store: The `TCPStore` at which the ranks meet; None = connect to it.

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
        super().__init__(place.rank, place.num_ranks, self.accelerator.device, first_ranks=place.first_ranks)

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
        store: The store at which the ranks meet; None = connect to it.
    """
    interface = interface_of(place.address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if place.machines:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    timeout = timedelta(seconds=place.timeout_s)
    backend = "gloo" if device == "cpu" else "nccl"
    store = join_store(place) if store is None else store
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.num_ranks, timeout=timeout)


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address.

    gloo would else look the host's own name up, which need not resolve.

    Raises:
        EngineError: No interface has it.
    """
    wanted = {str(found[4][0]) for found in _resolved(address)}
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] in wanted for each in addresses):
            return name
    raise EngineError(
        f"no network interface of this machine has the address {address}, over which training ranks talk to each "
        "other; correct machines[].address of the cluster file"
    )


def _resolved(address: str) -> list[Any]:
    try:
        return socket.getaddrinfo(address, None)
    except OSError:
        return []


@contextmanager
def _rank_environment(place: RankPlace) -> Iterator[None]:
    """What torchrun sets and accelerate reads, for the time of accelerate's set-up only."""
    if place.num_ranks == 1:
        # A launcher's variables around the engine would make accelerate wait for ranks that don't exist.
        wanted: dict[str, str | None] = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    else:
        wanted = {
            "RANK": str(place.rank), "LOCAL_RANK": str(place.local_rank), "WORLD_SIZE": str(place.num_ranks),
            "LOCAL_WORLD_SIZE": str(len(place.local_ranks)),
            "MASTER_ADDR": place.host, "MASTER_PORT": str(place.port),
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
