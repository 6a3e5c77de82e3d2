"""Files that ranks on other machines wrote, brought to the machine of rank 0 over the ranks' own connections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor
from torch import distributed as dist

from stages.engines.training.rank_group import RankGroup
from stages.errors import EngineError

CHUNK_BYTES = 16 * 2**20
"""Most bytes of a file in memory at once."""


def collect_files(directories: Sequence[Path], ranks: RankGroup) -> None:
    """Bring all files in each machine's directories into the same directories of rank 0's machine.

    All ranks call it together, after all have written; the first rank of each machine sends.

    Raises:
        EngineError: Two machines wrote a file of the same name.
    """
    for sender in ranks.first_ranks[1:]:
        if ranks.rank == sender:
            _send(directories, ranks.device)
        elif ranks.rank == 0:
            _receive(directories, sender, ranks.device)


def _send(directories: Sequence[Path], device: torch.device) -> None:
    found = [(place, path) for place, folder in enumerate(directories) for path in sorted(folder.rglob("*"))]
    files = [(place, path) for place, path in found if path.is_file()]
    listing = [
        (place, path.relative_to(directories[place]).as_posix(), path.stat().st_size) for place, path in files
    ]  # fmt: skip
    header = _bytes_tensor(json.dumps(listing).encode(), device)
    dist.send(torch.tensor([len(header)], dtype=torch.int64, device=device), 0)
    dist.send(header, 0)
    for _, path in files:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                dist.send(_bytes_tensor(chunk, device), 0)


def _receive(directories: Sequence[Path], sender: int, device: torch.device) -> None:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, sender)
    listing = json.loads(_received(int(length.item()), sender, device))
    for place, name, size in listing:
        path = directories[place] / PurePosixPath(name)
        if path.exists() or not path.resolve().is_relative_to(directories[place].resolve()):
            raise EngineError(f"training rank {sender} sent the file {name}, which rank 0's machine wrote too")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for start in range(0, size, CHUNK_BYTES):
                file.write(_received(min(CHUNK_BYTES, size - start), sender, device))


def _received(length: int, sender: int, device: torch.device) -> bytes:
    content = torch.empty(length, dtype=torch.uint8, device=device)
    dist.recv(content, sender)
    return bytes(content.cpu().numpy())


def _bytes_tensor(content: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
