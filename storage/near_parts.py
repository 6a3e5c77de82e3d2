"""Parts of an artefact brought to this machine while they are looked at: read often, they cross a link once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from storage.errors import ObjectMissingError
from storage.manifest import Manifest
from storage.store import Store


class _NearParts:
    """A store some of whose objects have a copy on this machine."""

    def __init__(self, store: Store, copies: Mapping[str, Path]) -> None:
        self._store, self._copies = store, copies

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the methods of a store
        """Everything that is not about a copy is the store's own."""
        return getattr(self._store, name)

    def size(self, key: str) -> int | None:
        """See :class:`storage.store.Store`."""
        return self._copies[key].stat().st_size if key in self._copies else self._store.size(key)

    def open_input(self, key: str) -> BinaryIO:
        """See :class:`storage.store.Store`."""
        return self._copies[key].open("rb") if key in self._copies else self._store.open_input(key)

    def local_path(self, key: str) -> Path | None:
        """See :class:`storage.store.Store`."""
        return self._copies.get(key)


@contextmanager
def near_parts(store: Store, manifest: Manifest) -> Iterator[Store]:
    """Give a store that has an artefact's parts at hand; one on this machine is given as it is.

    Args:
        store: Where the artefact lies. Parts that are missing there are missing from what is given too.
        manifest: The artefact; the temporary folder holds all of its parts at once.
    """
    if all(store.local_path(part.path) is not None for part in manifest.parts):
        yield store
        return
    with tempfile.TemporaryDirectory(prefix="motley-parts-") as folder:
        copies = {part.path: Path(folder) / str(number) for number, part in enumerate(manifest.parts)}
        for key, path in list(copies.items()):
            try:
                store.download(key, path)
            except ObjectMissingError:
                del copies[key]
        near: Any = _NearParts(store, copies)  # the rest of the protocol is found at run time
        yield near
