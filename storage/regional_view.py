"""One run over the stores of its regions, as one store to read from: every object is found where it lies.

Rows stay in the region that made them, so none of the stores has all of a run. Readers of a whole run (people's
commands, pages, exports, verification) get this view; stages know their region and do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from storage.errors import ObjectMissingError, StoreAccessError
from storage.runs import load_run
from storage.store import ObjectInfo, Store, open_store

Result = TypeVar("Result")


class RegionalView:
    """The stores of several regions, nearest first, to read from; writing is refused."""

    def __init__(self, stores: Sequence[Store]) -> None:
        """Look into these stores, in this order."""
        self._stores = tuple(stores)
        self._homes: dict[str, Store] = {}

    @property
    def url(self) -> str:
        """URL of the first store."""
        return self._stores[0].url

    @property
    def has_conditional_create(self) -> bool:
        """Nothing is created through a view."""
        return False

    def read_bytes(self, key: str) -> bytes:
        """See :class:`storage.store.Store`."""
        return self._first(lambda store: store.read_bytes(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See :class:`storage.store.Store`."""
        if (home := self._homes.get(key)) is not None:
            with suppress(ObjectMissingError):
                return home.read_range(key, start, length)
        return self._first(lambda store: store.read_range(key, start, length))

    def download(self, key: str, path: Path) -> None:
        """See :class:`storage.store.Store`."""
        self._first(lambda store: store.download(key, path))

    def size(self, key: str) -> int | None:
        """See :class:`storage.store.Store`; ranges that are read afterwards are asked of the same store first."""
        for store in self._stores:
            if (size := store.size(key)) is not None:
                self._homes[key] = store
                return size
        return None

    def exists(self, key: str) -> bool:
        """See :class:`storage.store.Store`."""
        return any(store.exists(key) for store in self._stores)

    def open_input(self, key: str) -> BinaryIO:
        """See :class:`storage.store.Store`."""
        return self._owner(key).open_input(key)

    def local_path(self, key: str) -> Path | None:
        """See :class:`storage.store.Store`."""
        return self._owner(key).local_path(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See :class:`storage.store.Store`; what several stores have is listed once, as the first one has it."""
        found = {info.key: info for store in reversed(self._stores) for info in store.list(prefix)}
        yield from (found[key] for key in sorted(found))

    def publish(self, key: str, data: bytes) -> None:  # noqa: ARG002
        """Refused: a view is read only."""
        self._refuse("write", key)

    def publish_file(self, key: str, path: Path) -> None:  # noqa: ARG002
        """Refused: a view is read only."""
        self._refuse("write", key)

    def create(self, key: str, data: bytes) -> bool:  # noqa: ARG002
        """Refused: a view is read only."""
        self._refuse("write", key)

    def delete(self, key: str) -> bool:
        """Refused: a view is read only."""
        self._refuse("delete", key)

    def _first(self, read: Callable[[Store], Result]) -> Result:
        """Return what the first store that has an object gives; raises the first one's error where none has it."""
        try:
            return read(self._stores[0])
        except ObjectMissingError:
            for store in self._stores[1:]:
                with suppress(ObjectMissingError):
                    return read(store)
            raise

    def _owner(self, key: str) -> Store:
        return next((store for store in self._stores if store.exists(key)), self._stores[0])

    def _refuse(self, action: str, key: str) -> NoReturn:
        message = f"cannot {action} {self.url}/{key}: this is a view of several regions' stores; open the region's own"
        raise StoreAccessError(message, key=key)


def view_of(stores: Sequence[Store]) -> Store:
    """Return stores as one to read from; a single one is returned as it is."""
    return stores[0] if len(stores) == 1 else RegionalView(stores)


def run_stores(store: Store, run: str, **options: Any) -> list[Store]:  # noqa: ANN401 - fsspec's options
    """Return the stores of all regions of a run, the given one first; a copy that lies elsewhere stands by itself.

    Args:
        store: Store of any of its regions.
        run: Run name.
        options: fsspec options of the others, over those of the environment.

    Raises:
        ObjectMissingError, CorruptObjectError, SchemaVersionError: the run's record can't be read.
    """
    roots = load_run(store, run).metadata.get("roots")
    others = dict.fromkeys(roots.values()) if isinstance(roots, dict) else {}
    opened = {other.url: other for other in (open_store(str(root), **options) for root in others)}
    if store.url not in opened:
        return [store]
    return [store, *(other for url, other in opened.items() if url != store.url)]
