"""A read-only file system over a store, so that pyarrow and DuckDB scan any store with retries and typed errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from fsspec import AbstractFileSystem

from storage.errors import ObjectMissingError
from storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds


def dataset_of(store: Store, keys: Sequence[str], schema: pa.Schema) -> ds.Dataset:
    """Return a lazily read data set of Parquet objects.

    Args:
        store: Where the objects lie.
        keys: Object keys from manifests.
        schema: Schema of the data set; columns that an older object lacks read as null.

    Raises:
        ObjectMissingError: An object is gone.
    """
    import pyarrow.dataset as ds
    from pyarrow import fs

    paths = [store.local_path(key) for key in keys]
    local = [str(path) for path in paths if path is not None]
    filesystem = fs.LocalFileSystem()
    if len(local) != len(keys):
        local, filesystem = list(keys), fs.PyFileSystem(fs.FSSpecHandler(_ReadOnlyFiles(store)))
    try:
        return ds.dataset(local, schema=schema, format="parquet", filesystem=filesystem)
    except FileNotFoundError as error:
        gone = next((key for key in keys if not store.exists(key)), keys[0])
        message = (
            f"{store.url}/{gone} is missing although its manifest names it: it was removed by retention or by hand; "
            "run `motley verify`"
        )
        raise ObjectMissingError(message, key=gone) from error


class _ReadOnlyFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no type information
    """Named objects of one store; listing and writing are refused (the base class has no such methods)."""

    cachable = False
    protocol = "motley-store"

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def info(self, path: str, **_: object) -> dict[str, Any]:
        size = self._store.size(path)
        if size is None:
            raise FileNotFoundError(path)
        return {"name": path, "size": size, "type": "file"}

    def open(self, path: str, mode: str = "rb", **_: object) -> BinaryIO:
        if mode != "rb":
            message = f"{self._store.url}/{path}: mode {mode} is refused, this view only reads"
            raise PermissionError(message)
        return self._store.open_input(path)
