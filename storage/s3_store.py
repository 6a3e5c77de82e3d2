"""The store on S3 and what speaks its protocol.

Neither botocore nor s3fs repeats anything here: their repeats would multiply with those of ``storage.retry``, so that a
peer that is silent, or a server whose disk is full, would be asked dozens of times before anybody is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import fsspec
from fsspec.exceptions import FSTimeoutError

from storage.foreign_errors import translated
from storage.multipart import PARTS_IN_FLIGHT, upload_file
from storage.store import FsspecStore

CONNECT_TIMEOUT_S: Final = 10
"""Seconds after which a peer that takes no connection is given up."""

READ_TIMEOUT_S: Final = 60
"""Seconds after which a connected peer that says nothing is given up: writing a large object may take a server long."""

SLOWEST_BYTES_PER_S: Final = 64 << 10
"""Rate of one upload below which it is given up."""

_CONFIG: Final[Mapping[str, Any]] = {
    # Other servers than Amazon's send the whole object's checksum with a range; manifests hold SHA-256.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "connect_timeout": CONNECT_TIMEOUT_S,
    "read_timeout": READ_TIMEOUT_S,
    "max_pool_connections": 4 * PARTS_IN_FLIGHT,
    "retries": {"mode": "standard", "total_max_attempts": 1},
}


def s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which s3fs is opened: the given ones, over what this package asks of botocore.

    Args:
        options: fsspec options of the root; each key of their ``config_kwargs`` wins, ``retries`` too. No
            ``read_timeout`` (null) is as none given: a silent peer would hold up a run for ever.
    """
    given = {name: value for name, value in options.get("config_kwargs", {}).items() if value is not None}
    return {**options, "config_kwargs": {**_CONFIG, **given}}


class S3Store(FsspecStore):
    """A store on s3fs whose every call is one request, and which takes large files in parts."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str, url: str) -> None:
        """Wrap a file system.

        Args:
            filesystem: s3fs file system, opened with :func:`s3_options`; it stops repeating calls.
            root: Bucket and prefix.
            url: URL of the root for messages, without credentials.
        """
        super().__init__(filesystem, root, url)
        filesystem.retries = 1  # s3fs has no option for it
        self._silence_s = float(filesystem.config_kwargs["read_timeout"])

    def read_bytes(self, key: str) -> bytes:
        """Return an object, by one request: s3fs would ask for its length first, to read long ones in parts."""
        with translated(self.url, key, "read"):
            return bytes(self._fs.cat_file(self._path(key), max_concurrency=1))

    def publish_file(self, key: str, path: Path) -> None:
        """Upload a local file, in parts if it is large; visible when complete."""
        with translated(self.url, key, "write"):
            upload_file(self, key, path)

    def begin_upload(self, key: str) -> str:
        """See :class:`storage.multipart.MultipartStore`."""
        return str(self._request(key, "create_multipart_upload")["UploadId"])

    def upload_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        """See :class:`storage.multipart.MultipartStore`."""
        return str(self._request(key, "upload_part", UploadId=upload, PartNumber=number, Body=data)["ETag"])

    def finish_upload(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """See :class:`storage.multipart.MultipartStore`."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        self._request(key, "complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": parts})
        self._forget(self._path(key))

    def abandon_upload(self, key: str, upload: str) -> None:
        """See :class:`storage.multipart.MultipartStore`."""
        self._request(key, "abort_multipart_upload", UploadId=upload)

    def _put(self, path: str, data: bytes, **options: Any) -> None:  # noqa: ANN401 - s3fs's options
        self._timed(self._fs.pipe_file, len(data), path, data, **options)

    def _request(self, key: str, name: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401 - S3's own parameters
        with translated(self.url, key, "write"):
            bucket, path, _ = self._fs.split_path(self._path(key))
            size = len(arguments.get("Body", b""))
            answer: dict[str, Any] = self._timed(self._fs.call_s3, size, name, Bucket=bucket, Key=path, **arguments)
            return answer

    def _timed(self, call: Callable[..., Any], num_bytes: int, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """Make a request that writes; the client's own timeout does not count before all is written.

        Raises:
            TimeoutError: Nothing came back in time, e.g. from a server that never says that it may go on (100).
        """
        limit_s = self._silence_s + num_bytes / SLOWEST_BYTES_PER_S
        try:
            return call(*arguments, timeout=limit_s, **options)
        except FSTimeoutError as error:
            peer = getattr(self._fs, "endpoint_url", None) or "the store"
            message = (
                f"{peer} did not take {num_bytes} bytes within {limit_s:.1f} s; it may be read-only or out of reach"
            )
            raise TimeoutError(message) from error
