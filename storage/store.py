"""The ``Store`` protocol and its fsspec implementation: atomic publish, typed errors, nothing else.

A store maps keys (``storage.layout``) to bytes. ``publish`` is atomic for readers: on object stores it is a single
PUT, on POSIX file systems a temporary file, fsync, rename and fsync of the folder (``storage.posix_store``). There
are no locks (file locks fail on network file systems): each object has one writer.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import fsspec

from storage.errors import InvalidNameError, ObjectMissingError, UnsupportedStoreError
from storage.foreign_errors import translated
from storage.ranged_reads import download_ranges, open_ranges
from storage.store_options import options_of

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """What a listing says of one object."""

    key: str
    """Object key, relative to the store's root."""
    size: int
    """Length in bytes."""
    modified: datetime | None
    """Last change (UTC) by the store's clock, ``None`` if the store does not tell."""


@runtime_checkable
class Store(Protocol):
    """A flat map from key to bytes under one root.

    Every method raises a :class:`storage.errors.StorageError` and nothing else; a
    :class:`storage.errors.TransientStorageError` means that the same call may be repeated, which is safe for every
    method.
    """

    @property
    def url(self) -> str:
        """URL of the root, without credentials."""
        ...

    def read_bytes(self, key: str) -> bytes:
        """Return an object. Raises ``ObjectMissingError`` if there is none."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from byte ``start`` on; fewer only at the object's end."""
        ...

    def size(self, key: str) -> int | None:
        """Return the length in bytes, or ``None`` if there is no such object."""
        ...

    def exists(self, key: str) -> bool:
        """Say whether there is such an object."""
        ...

    def publish(self, key: str, data: bytes) -> None:
        """Make ``data`` the object's content, at once and wholly; an older content is replaced."""
        ...

    def publish_file(self, key: str, path: Path) -> None:
        """Like :meth:`publish`, from a local file, in bounded memory."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Publish only if there is no such object; return whether it was published.

        Exact where :attr:`has_conditional_create`, otherwise a check followed by a publish (one writer per object
        makes that enough).
        """
        ...

    @property
    def has_conditional_create(self) -> bool:
        """Whether :meth:`create` decides between concurrent writers (found by probe, not by name)."""
        ...

    def download(self, key: str, path: Path) -> None:
        """Write an object to a local file, in bounded memory."""
        ...

    def open_input(self, key: str) -> BinaryIO:
        """Open an object for seeking reads (Parquet footers and single columns)."""
        ...

    def delete(self, key: str) -> bool:
        """Remove an object; return whether there was one."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List all objects below a folder. For maintenance only: readers follow manifests."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Return where the object lies on this machine's file system, ``None`` for remote stores."""
        ...


def checked_key(key: str) -> str:
    """Return ``key`` if no segment of it leaves the root.

    Raises:
        InvalidNameError: Empty, absolute, or with an empty, ``.`` or ``..`` segment or a backslash or NUL.
    """
    if not key or "\\" in key or "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        message = f"object key {key!r} leaves or cannot lie in the store: build keys with storage.layout"
        raise InvalidNameError(message, key=key)
    return key


class FsspecStore:
    """A store on any fsspec file system whose PUT is atomic (S3, GCS, Azure, memory)."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str, url: str) -> None:
        """Wrap a file system.

        Args:
            filesystem: fsspec file system.
            root: Path of the root as the file system wants it.
            url: URL of the root for messages, without credentials.
        """
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._url = url
        self._conditional: bool | None = None

    @property
    def url(self) -> str:
        """URL of the root, without credentials."""
        return self._url

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"

    def read_bytes(self, key: str) -> bytes:
        """Return an object."""
        path = self._path(key)
        with translated(self._url, key, "read"):
            return bytes(self._fs.cat_file(path))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return a byte range of an object."""
        path = self._path(key)
        if length == 0:
            return b""
        with translated(self._url, key, "read"):
            return bytes(self._fs.cat_file(path, start=start, end=start + length))

    def size(self, key: str) -> int | None:
        """Return the length in bytes, ``None`` if there is no such object."""
        path = self._path(key)
        try:
            with translated(self._url, key, "look up"):
                self._forget(path)
                info = self._fs.info(path)
        except ObjectMissingError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def exists(self, key: str) -> bool:
        """Say whether there is such an object."""
        return self.size(key) is not None

    def publish(self, key: str, data: bytes) -> None:
        """Replace the object by a single PUT."""
        path = self._path(key)
        with translated(self._url, key, "write"):
            self._prepare(path)
            self._put(path, bytes(data))
            self._forget(path)

    def publish_file(self, key: str, path: Path) -> None:
        """Upload a local file; visible when complete."""
        target = self._path(key)
        with translated(self._url, key, "write"):
            self._prepare(target)
            self._fs.put_file(str(path), target)
            self._forget(target)

    @property
    def has_conditional_create(self) -> bool:
        """Whether the store honours a conditional PUT, found by creating a probe object twice."""
        if self._conditional is None:
            self._conditional = self._probe_conditional_create()
        return self._conditional

    def create(self, key: str, data: bytes) -> bool:
        """Publish only if there is no such object."""
        path = self._path(key)
        if self.exists(key):
            return False
        if not self.has_conditional_create:
            self.publish(key, data)
            return True
        with translated(self._url, key, "write"):
            self._prepare(path)
            created = self._create_once(path, bytes(data))
            self._forget(path)
            return created

    def _put(self, path: str, data: bytes, **options: Any) -> None:  # noqa: ANN401 - fsspec's options
        self._fs.pipe_file(path, data, **options)

    def _create_once(self, path: str, data: bytes) -> bool:
        try:
            self._put(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if "PreconditionFailed" in str(error) or "pre-condition" in str(error).lower():
                return False
            raise
        return True

    def _probe_conditional_create(self) -> bool:
        key = f"_probe/{uuid.uuid4().hex}"
        path = self._path(key)
        with translated(self._url, key, "write"):
            self._prepare(path)
            try:
                self._put(path, b"1", mode="create")
                return not self._create_once(path, b"2")
            except (TypeError, ValueError, NotImplementedError):
                return False
            finally:
                self._forget(path)
                if self._fs.exists(path):
                    self._fs.rm_file(path)

    def download(self, key: str, path: Path) -> None:
        """Stream an object to a local file."""
        with translated(self._url, key, "read"):
            download_ranges(self, key, path)

    def open_input(self, key: str) -> BinaryIO:
        """Open an object for seeking reads."""
        return open_ranges(self, key)

    def delete(self, key: str) -> bool:
        """Remove an object."""
        path = self._path(key)
        if not self.exists(key):
            return False
        try:
            with translated(self._url, key, "delete"):
                self._fs.rm_file(path)
                self._forget(path)
        except ObjectMissingError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List all objects below a folder, in the order of their keys."""
        base = self._path(prefix) if prefix else self._root
        with translated(self._url, prefix, "list"):
            self._fs.invalidate_cache()
            found = self._fs.find(base, detail=True)
        for path, info in sorted(found.items()):
            yield ObjectInfo(key=self._key_of(path), size=int(info["size"] or 0), modified=_modified(info))

    def local_path(self, key: str) -> Path | None:
        """Remote objects have no local path."""
        self._path(key)
        return None

    def _key_of(self, path: str) -> str:
        root = self._root.lstrip("/")
        return path.lstrip("/")[len(root) + 1 :] if root else path.lstrip("/")

    def _prepare(self, path: str) -> None:
        """Create parent folders where the file system has folders (object stores have none)."""
        if self._fs.protocol == "memory" or "memory" in self._fs.protocol:
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)

    def _forget(self, path: str) -> None:
        """Drop fsspec's cached listings, which would answer from before another process's write."""
        self._fs.invalidate_cache(path)
        self._fs.invalidate_cache(path.rsplit("/", 1)[0])


def _modified(info: dict[str, Any]) -> datetime | None:
    for field in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = info.get(field)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, UTC)
    return None


def open_store(url: str, *, is_retrying: bool = True, **options: Any) -> Store:  # noqa: ANN401 - fsspec's options
    """Open the object store at a URL.

    Args:
        url: fsspec URL of the root: ``file:///data/rl``, ``memory://x``, ``s3://bucket/prefix``; a plain path is a
            local folder. Credentials belong in the environment or in ``options``, never in the URL.
        is_retrying: Repeat calls that fail transiently (``storage.retry``).
        options: Passed to the fsspec file system (``endpoint_url``, ``key``, ``secret`` ...), over those that the
            environment has for the root (``storage.store_options``).

    Raises:
        UnsupportedStoreError: Unknown protocol, missing package, or credentials in the URL.
        CredentialsError: The environment's options cannot be read.
    """
    from storage.posix_store import PosixStore
    from storage.retry import RetryingStore

    protocol, _, rest = url.partition("://") if "://" in url else ("file", "", url)
    if "@" in rest.split("/", 1)[0]:
        message = f"store URL of protocol {protocol} holds credentials: put them in the environment, not in the URL"
        raise UnsupportedStoreError(message)
    options = {**options_of(url), **options}
    store: Store
    if protocol in ("file", "local"):
        store = PosixStore(Path(rest), **options)
    else:
        store = _remote_store(url, protocol, options)
    return RetryingStore(store) if is_retrying else store


def _remote_store(url: str, protocol: str, options: dict[str, Any]) -> Store:
    from storage.s3_store import S3Store, s3_options

    package = _PACKAGES.get(protocol)
    if package == "s3fs":
        options = s3_options(options)
    try:
        if package is not None:
            importlib.import_module(package)
        # Cached listings of fsspec would hide what other processes wrote.
        filesystem, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        message = f"store URL {url!r} needs the package {package or error.name}: install Motley's extra for it"
        raise UnsupportedStoreError(message) from error
    except ValueError as error:
        message = f"store URL {url!r} cannot be opened ({error}); known are file, memory, s3, gs and abfs"
        raise UnsupportedStoreError(message) from error
    return (S3Store if package == "s3fs" else FsspecStore)(filesystem, root, url)
