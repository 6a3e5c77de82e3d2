"""A store in a dictionary: quick, so that campaigns can run thousands of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from storage.errors import ObjectMissingError
from storage.foreign_errors import translated
from storage.ranged_reads import open_ranges
from storage.store import ObjectInfo, checked_key


class DictStore:
    """Objects by key; with or without conditional create."""

    def __init__(self, name: str, *, is_conditional: bool = True) -> None:
        self.url = f"dict://{name}"
        self.has_conditional_create = is_conditional
        self.objects: dict[str, bytes] = {}

    def read_bytes(self, key: str) -> bytes:
        try:
            return self.objects[checked_key(key)]
        except KeyError:
            raise ObjectMissingError(f"cannot read {self.url}/{key}: there is no such object", key=key) from None

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self.read_bytes(key)[start : start + length]

    def size(self, key: str) -> int | None:
        data = self.objects.get(checked_key(key))
        return None if data is None else len(data)

    def exists(self, key: str) -> bool:
        return checked_key(key) in self.objects

    def publish(self, key: str, data: bytes) -> None:
        self.objects[checked_key(key)] = bytes(data)

    def publish_file(self, key: str, path: Path) -> None:
        with translated(self.url, key, "write"):
            self.publish(key, path.read_bytes())

    def create(self, key: str, data: bytes) -> bool:
        if self.exists(key):
            return False
        self.publish(key, data)
        return True

    def download(self, key: str, path: Path) -> None:
        path.write_bytes(self.read_bytes(key))

    def open_input(self, key: str) -> BinaryIO:
        return open_ranges(self, key)

    def delete(self, key: str) -> bool:
        return self.objects.pop(checked_key(key), None) is not None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        base = f"{prefix}/" if prefix else ""
        for key in sorted(self.objects):
            if key.startswith(base):
                yield ObjectInfo(key=key, size=len(self.objects[key]), modified=datetime(2026, 1, 1, tzinfo=UTC))

    def local_path(self, key: str) -> Path | None:
        checked_key(key)
        return None
