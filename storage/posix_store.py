"""The store on a POSIX file system: temporary file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from storage.foreign_errors import translated
from storage.ranged_reads import COPY_BYTES
from storage.store import ObjectInfo, checked_key

TEMPORARY_PREFIX = ".tmp-"
"""Prefix of the name of a file that is being written; never a valid key segment of the layout."""


class PosixStore:
    """A store in a local or network-mounted folder."""

    def __init__(self, root: Path, *, is_synced: bool = True) -> None:
        """Use a folder; it is created at the first write.

        Args:
            root: Folder of the store.
            is_synced: Call fsync, so that a published object survives a power cut (a killed process needs none).
        """
        self._root = root.expanduser().absolute()
        self._is_synced = is_synced

    @property
    def url(self) -> str:
        """URL of the root."""
        return f"file://{self._root}"

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    def read_bytes(self, key: str) -> bytes:
        """Return an object."""
        with translated(self.url, key, "read"):
            return self._path(key).read_bytes()

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return a byte range of an object."""
        with translated(self.url, key, "read"), self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def size(self, key: str) -> int | None:
        """Return the length in bytes, ``None`` if there is no such object."""
        path = self._path(key)
        with translated(self.url, key, "look up"):
            try:
                return path.stat().st_size if path.is_file() else None
            except FileNotFoundError:
                return None

    def exists(self, key: str) -> bool:
        """Say whether there is such an object."""
        return self.size(key) is not None

    def publish(self, key: str, data: bytes) -> None:
        """Replace the object by renaming a complete, synced temporary file onto it."""
        with translated(self.url, key, "write"):
            temporary = self._write_temporary(self._path(key), data)
            self._rename(temporary, self._path(key))

    def publish_file(self, key: str, path: Path) -> None:
        """Copy a local file to a temporary one beside the object, then rename it."""
        with translated(self.url, key, "write"):
            temporary = self._write_temporary(self._path(key), path)
            self._rename(temporary, self._path(key))

    @property
    def has_conditional_create(self) -> bool:
        """A hard link onto an existing name fails on every POSIX file system."""
        return True

    def create(self, key: str, data: bytes) -> bool:
        """Publish only if there is no such object, decided by ``link``, which never replaces."""
        target = self._path(key)
        with translated(self.url, key, "write"):
            temporary = self._write_temporary(target, data)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            self._sync_folder(target.parent)
            return True

    def download(self, key: str, path: Path) -> None:
        """Copy an object to a local file."""
        with translated(self.url, key, "read"):
            shutil.copyfile(self._path(key), path)

    def open_input(self, key: str) -> BinaryIO:
        """Open an object for seeking reads."""
        with translated(self.url, key, "read"):
            return self._path(key).open("rb")

    def delete(self, key: str) -> bool:
        """Remove an object; its folder stays, since a writer may just be about to use it."""
        path = self._path(key)
        with translated(self.url, key, "delete"):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List all objects below a folder, in the order of their keys, temporary files included."""
        base = self._path(prefix) if prefix else self._root
        with translated(self.url, prefix, "list"):
            found = sorted(self._walk(base), key=lambda info: info.key)
        yield from found

    def local_path(self, key: str) -> Path | None:
        """Return the file of an object."""
        return self._path(key)

    def _walk(self, base: Path) -> Iterator[ObjectInfo]:
        for folder, _, names in os.walk(base):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # removed by its writer between the two calls
                    stat = path.stat()
                    key = path.relative_to(self._root).as_posix()
                    yield ObjectInfo(key=key, size=stat.st_size, modified=datetime.fromtimestamp(stat.st_mtime, UTC))

    def _write_temporary(self, target: Path, source: bytes | Path) -> Path:
        self._make_folder(target.parent)
        temporary = target.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        file = temporary.open("xb")
        try:
            with file:
                if isinstance(source, Path):
                    with source.open("rb") as opened:
                        shutil.copyfileobj(opened, file, COPY_BYTES)
                else:
                    file.write(source)
                if self._is_synced:
                    file.flush()
                    os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _rename(self, temporary: Path, target: Path) -> None:
        try:
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._sync_folder(target.parent)

    def _make_folder(self, folder: Path) -> None:
        """Create a folder and what is missing above it, each entry synced; another process may do the same (C18)."""
        missing = [folder]
        while not missing[-1].exists() and missing[-1].parent != missing[-1]:
            missing.append(missing[-1].parent)
        for created in reversed(missing[:-1]):
            created.mkdir(exist_ok=True)
            self._sync_folder(created.parent)

    def _sync_folder(self, folder: Path) -> None:
        if not self._is_synced:
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
