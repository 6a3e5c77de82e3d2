"""Local folders for what is on its way: each has one user at a time, and what a failed or dead one left is taken over.

There are no locks (they fail on network file systems). A folder carries its process's number; whoever finds one that
nobody uses takes it by renaming it, which only one can.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_IN_USE: set[Path] = set()
"""Folders that this process is using now."""


@contextmanager
def arriving_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside a target, with what an earlier try at it left; the user removes it when it is done.

    Args:
        target: File or folder that is to appear; its parent folder is created.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.arriving-"
    own = target.parent / f"{prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    _IN_USE.add(own)
    try:
        for left in sorted(target.parent.glob(f"{prefix}*")):
            if left not in _IN_USE and not _is_used_elsewhere(left):
                with suppress(OSError):  # somebody else was quicker
                    left.rename(own)
                    break
        own.mkdir(exist_ok=True)
        yield own
    finally:
        _IN_USE.discard(own)


def _is_used_elsewhere(folder: Path) -> bool:
    pid = int(folder.name.split("-")[-2])
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
