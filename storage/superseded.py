"""What a rewind sets aside: artefacts of iterations that are made anew, kept and readable, but out of every view.

A rewind to version v makes the iterations from v on once more. Their manifests and records move from
``<run>/<key>`` to ``<run>/superseded/<n>/<key>`` (n counts the rewinds of the run, from 1); the data objects stay
where they are, since attempts never overwrite each other. So nothing that is made anew can be taken for what was made
before, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from storage.checkpoints import read_index, set_index
from storage.documents import read_model
from storage.errors import CorruptObjectError, InvalidNameError, ObjectMissingError, PolicyVersionError
from storage.layout import Split, run_folder, superseded, superseded_folder
from storage.manifest import MANIFEST_FORMAT, Manifest
from storage.parsed_keys import Kind, ParsedKey, parse_key
from storage.policies import PolicyHead, num_rollbacks, read_head, resolve_policy, roll_back_head
from storage.removed_rollouts import forget_removals
from storage.store import Store


def rewind(home: Store, others: list[Store], run: str, version: int, *, reason: str, at: datetime) -> PolicyHead:
    """Set the head back to a version and set everything aside that was made from it on; may be repeated after a crash.

    Nothing of the run may be at work.

    Args:
        home: Store of the policies.
        others: Stores of other regions.
        run: Run name.
        version: Committed version, below the head.
        reason: Why, in words.
        at: When, UTC.

    Raises:
        PolicyVersionError: The version is above the head, or is the head and no rewind to it was left unfinished.
        ObjectMissingError: The version is not kept any more.
    """
    head = read_head(home, run)
    if head is None or version > head.version:
        message = f"run {run}: the head is {None if head is None else head.version}, so {version} is no earlier version"
        raise PolicyVersionError(message)
    is_unfinished = bool(head.rollbacks) and head.rollbacks[-1].to_version == version == head.version
    if version == head.version and not is_unfinished:
        message = f"run {run}: version {version} is the head already; there is nothing to rewind"
        raise PolicyVersionError(message)
    resolve_policy(home, run, version)
    number = len(head.rollbacks) + (0 if is_unfinished else 1)
    copy = _already_copied if is_unfinished else _copied
    moved = [(store, copy(store, run, version, number)) for store in (home, *others)]
    if not is_unfinished:
        head = roll_back_head(home, run, version, reason=reason, at=at)
    set_index(home, run, {known for known in read_index(home, run) if known <= version})
    for store, keys in moved:
        for key in keys:
            store.delete(key)
        forget_removals(store, run, version)
    return head


def lineage_of_version(head: PolicyHead | None, version: int) -> int:
    """Return how often a version was set aside to be made anew; 0 for all versions of a run without rewinds."""
    return num_rollbacks(head, version)


def lineage_of_iteration(head: PolicyHead | None, iteration: int) -> int:
    """Return how often an iteration was set aside; it makes version ``iteration + 1``."""
    return num_rollbacks(head, iteration + 1)


def superseded_parts(store: Store, run: str) -> set[str]:
    """Return the data objects that set-aside manifests name; whoever deletes objects must spare them."""
    return {part.path for manifest in superseded_manifests(store, run) for part in manifest.parts}


def superseded_manifests(store: Store, run: str) -> Iterator[Manifest]:
    """Yield the manifests that rewinds have set aside; unreadable ones are left out (``motley verify`` names them)."""
    for info in store.list(superseded_folder(run)):
        if info.key.endswith("/manifest.json"):
            try:
                yield read_model(store, info.key, Manifest, MANIFEST_FORMAT)
            except (CorruptObjectError, ObjectMissingError):
                continue


def _copied(store: Store, run: str, version: int, number: int) -> list[str]:
    """Copy manifests and records of a version's future below ``superseded``; return the originals' keys."""
    keys = [info.key for info in store.list(run_folder(run)) if _is_later(info.key, version)]
    for key in keys:
        store.publish(_target(run, number, key), store.read_bytes(key))
    return keys


def _already_copied(store: Store, run: str, version: int, number: int) -> list[str]:
    """Return the keys that a rewind that died had copied and not yet deleted; what was made since is left alone."""
    keys = [info.key for info in store.list(run_folder(run)) if _is_later(info.key, version)]
    targets = {key: _target(run, number, key) for key in keys}
    return [
        key for key in keys if store.exists(targets[key]) and store.read_bytes(targets[key]) == store.read_bytes(key)
    ]


def _target(run: str, number: int, key: str) -> str:
    return superseded(run, number, key.removeprefix(f"{run_folder(run)}/"))


def _is_later(key: str, version: int) -> bool:
    try:
        parsed = parse_key(key)
    except InvalidNameError:
        return False
    return not parsed.is_data and parsed.number is not None and _first_version_after(parsed) > version


_OF_ITERATIONS = (
    Kind.SHARD, Kind.ITERATION_RECORD, Kind.ITERATION_PLAN, Kind.QUALITY, Kind.GANG, Kind.RESCORED,
)  # fmt: skip


def _first_version_after(parsed: ParsedKey) -> int:
    """Return the policy version from which on an object is the future; -1 for what no rewind concerns."""
    number = parsed.number or 0
    is_evaluation = parsed.kind in (Kind.SHARD, Kind.RESCORED) and parsed.split is Split.EVAL
    if is_evaluation or parsed.kind in (Kind.POLICY, Kind.CHECKPOINT, Kind.CRITIC):
        return number
    return number + 1 if parsed.kind in _OF_ITERATIONS else -1
