"""The deltas of policy versions on this machine: read, proved, and the newest one applied while it arrives.

What comes out of a delta is proved tensor by tensor whatever its bytes were, and the delta itself by its SHA-256 once
all of it is here; whoever applies it shows nobody the result before both.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from storage.delta_apply import apply_deltas
from storage.errors import CorruptObjectError, DeltaMismatchError
from storage.manifest import sha256_of_file
from storage.policies import DELTA_PART, Policy
from storage.store import Store
from storage.transfer import Link, download_part, fetch_part
from storage.weight_delta import WeightDelta, parse_delta


def delta_file(policy: Policy, folder: Path) -> Path:
    """Return the name under which the delta of a version lies in a local folder."""
    return folder / f"{policy.version}-{policy.manifest.part(DELTA_PART).sha256[:16]}.delta"


def open_delta(store: Store, policy: Policy, folder: Path, link: Link | None = None) -> WeightDelta:
    """Return the delta that a version carries, read and compared with its manifest; not held in memory.

    Args:
        store: Store that the policy was resolved in.
        policy: The version.
        folder: Folder for the local copy, which stays there; one that is there is compared and used.
        link: How the link to the store is used.

    Raises:
        CorruptObjectError: Size, SHA-256 or structure is wrong.
        DeltaMismatchError: It is a delta between other weights than the manifest says.
    """
    part = policy.manifest.part(DELTA_PART)
    path = delta_file(policy, folder)
    if not _is_here(policy, folder):
        download_part(store, part, path, link)
    return _checked(store, policy, parse_delta(_mapped(path), part.path))


def apply_policy_deltas(
    store: Store, links: Sequence[Policy], base: Mapping[str, Path], folder: Path, out: Path, link: Link | None = None
) -> None:
    """Write the weights that a chain of versions makes from a base; the last delta is applied while it arrives.

    Args:
        store: Store that the versions were resolved in.
        links: Versions whose deltas are applied, oldest first.
        base: Safetensors files of the base, by name.
        folder: Folder for the local copies of the deltas, as :func:`open_delta` leaves them.
        out: Existing folder; what lies in it after a failure is nothing to rely on.
        link: How the link to the store is used.

    Raises:
        CorruptObjectError: A delta or the base is damaged.
        DeltaMismatchError: The chain is broken or does not give the promised tensors.
    """
    older, newest = [open_delta(store, policy, folder, link) for policy in links[:-1]], links[-1]
    try:
        with _arriving_delta(store, newest, folder, link) as delta:
            apply_deltas(base, [*older, delta], out)
    except CorruptObjectError:
        if not _is_here(newest, folder):
            raise
        # What arrived is proved now; it may not have been what was applied (bad bytes of an earlier call).
        apply_deltas(base, [*older, open_delta(store, newest, folder, link)], out)


@contextmanager
def _arriving_delta(store: Store, policy: Policy, folder: Path, link: Link | None) -> Iterator[WeightDelta]:
    """Give a delta whose blocks can be read while they arrive; at the end it is here and proved."""
    part = policy.manifest.part(DELTA_PART)
    if store.local_path(part.path) is not None or _is_here(policy, folder):
        yield open_delta(store, policy, folder, link)
        return
    arrival = _Arrival()
    with ThreadPoolExecutor(1, thread_name_prefix="delta") as pool:
        fetching = pool.submit(fetch_part, store, part, delta_file(policy, folder), link, arrival.grow)
        fetching.add_done_callback(arrival.end)
        try:
            yield _checked(store, policy, parse_delta(arrival.view(), part.path, arrival.wait_for))
        except CorruptObjectError:
            fetching.result()  # why it did not arrive is the better reason
            raise
        fetching.result()


class _Arrival:
    """How much of a file is here, from its beginning on; readers wait for what they need."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._partial: Path | None = None
        self._file: memoryview | None = None
        self._here = 0
        self._is_over = False

    def grow(self, partial: Path, here: int) -> None:
        """Note how many bytes of a file, which has its full length, are in it."""
        with self._changed:
            if self._file is None:
                self._partial, self._file = partial, _mapped(partial)
            if partial == self._partial:
                self._here = here
            else:
                self._is_over = True  # all is read anew, into another file
            self._changed.notify_all()

    def end(self, _: Future[int]) -> None:
        """Note that nothing comes any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def view(self) -> memoryview:
        """Return the whole file, which holds what has arrived so far.

        Raises:
            CorruptObjectError: It did not begin to arrive.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._file is not None or self._is_over)
            if self._file is None:
                raise CorruptObjectError("a delta did not arrive")
            return self._file

    def wait_for(self, end: int) -> None:
        """Wait until the first bytes, up to ``end``, are here.

        Raises:
            CorruptObjectError: They do not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._here >= end or self._is_over)
            if self._here < end:
                raise CorruptObjectError(f"a delta ended at byte {self._here} of at least {end}")


def _is_here(policy: Policy, folder: Path) -> bool:
    part, path = policy.manifest.part(DELTA_PART), delta_file(policy, folder)
    return path.is_file() and sha256_of_file(path) == (part.size, part.sha256)


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        # Not closed by hand: views of it live on in the blocks and in tracebacks.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _checked(store: Store, policy: Policy, delta: WeightDelta) -> WeightDelta:
    expected = (policy.delta.base_weights_hash if policy.delta else None, policy.weights_hash)
    if (delta.base_weights_hash, delta.weights_hash) != expected:
        part = policy.manifest.part(DELTA_PART)
        message = (
            f"policy version {policy.version} of run {policy.run} cannot be made from deltas: {store.url}/{part.path} "
            "is a delta between other weights"
        )
        raise DeltaMismatchError(message, key=part.path)
    return delta
