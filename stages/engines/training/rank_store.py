"""The c10d store at which the ranks of an engine, or of a gang of engines, meet."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch import distributed as dist

from stages.engines.launch import EngineLaunch
from stages.engines.training.rank_place import RankPlace
from stages.errors import EngineError, EngineUnavailableError

_TOKEN_KEY = "gang"
"""Key that names the gang in its store."""


def meeting_place(launch: EngineLaunch, num_ranks: int, timeout_s: float) -> RankPlace:
    """Return the place of the engine's own process; the port of the store is still open where it is 0.

    Raises:
        EngineError: The gang has other ranks than the engine's options ask for.
    """
    gang = launch.gang
    if gang is None:
        return RankPlace(num_ranks=num_ranks, timeout_s=timeout_s)
    if gang.num_ranks != num_ranks:
        raise EngineError(
            f"the engine's options ask for {num_ranks} ranks, but the machines of the gang have {gang.num_ranks} "
            f"({', '.join(f'{name}: {len(gang.ranks_of(name))}' for name in gang.machines)})"
        )
    return RankPlace(
        rank=gang.ranks_of(launch.machine)[0], num_ranks=num_ranks, host=gang.host, port=gang.port,
        address=gang.address, machines=gang.ranks, token=gang.token, timeout_s=timeout_s,
    )  # fmt: skip


def host_store(place: RankPlace) -> dist.TCPStore:
    """Make the store on the address of the place, and on no other one (by itself a TCPStore listens on all).

    Raises:
        EngineUnavailableError: The address is none of this machine, or the port is taken.
    """
    try:
        listener = socket.create_server((place.host, place.port), family=_family(place.host))
    except OSError as error:
        raise EngineUnavailableError(
            f"training rank 0 can't listen on {place.host} port {place.port}: {error.strerror or error}; the address "
            "must be one of this machine and the port free (machines[].address and rendezvous_port of the cluster file)"
        ) from error
    store = dist.TCPStore(
        place.host, listener.getsockname()[1], place.num_ranks, is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=place.timeout_s), master_listen_fd=listener.detach(),
    )  # fmt: skip
    store.set(_TOKEN_KEY, place.token)
    return store


def join_store(place: RankPlace) -> dist.TCPStore:
    """Connect to the store that rank 0's process made.

    Raises:
        EngineUnavailableError: It can't be reached.
        EngineError: It is the store of another gang: this engine came too late.
    """
    try:
        store = dist.TCPStore(
            place.host, place.port, place.num_ranks, is_master=False, timeout=timedelta(seconds=place.timeout_s)
        )
        found = store.get(_TOKEN_KEY).decode()
    except dist.DistError as error:
        raise EngineUnavailableError(
            f"training rank {place.rank} can't reach the ranks' store at {place.host} port {place.port} "
            f"({str(error).splitlines()[0]}); look at rank 0's machine and at the firewall between the two"
        ) from error
    if found != place.token:
        raise EngineError(
            f"training rank {place.rank} belongs to gang {place.token}, but at {place.host} port {place.port} gang "
            f"{found} meets: a late member is refused; its stage joins again",
            rank=place.rank,
        )
    return store


def _family(host: str) -> socket.AddressFamily:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return socket.AF_INET if any(family is socket.AF_INET for family, *_ in found) else socket.AF_INET6
