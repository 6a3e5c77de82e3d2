"""Bringing a policy version onto this machine: in place, by deltas from a version that is here, or whole.

Every way ends in the same bytes, proved before anybody sees them: a delta chain by the SHA-256 of every tensor of its
result, a whole file by its own. Where a chain is missing, broken or damaged, the next way is taken and the reason kept
(W13, W14); a folder appears complete or not at all.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from storage.arriving import arriving_folder
from storage.background import InBackground
from storage.errors import CorruptObjectError, DeltaMismatchError, ObjectMissingError
from storage.foreign_errors import on_this_machine
from storage.layout import policy_folder
from storage.manifest import Part, sha256_of_file
from storage.policies import DELTA_PART, LocalPolicy, Policy, resolve_policy
from storage.policy_copies import MAX_CHAIN
from storage.policy_deltas import apply_policy_deltas
from storage.store import Store
from storage.transfer import Link, download_part
from storage.weight_delta import MAX_FRACTION

Form = Literal["present", "in_place", "deltas", "whole", "adapter"]

Proved = Callable[[Part, Path], None]
"""Told on another thread of a file whose bytes are proved, while the next one arrives; it stays there meanwhile."""


@dataclass(frozen=True, slots=True)
class FetchedPolicy:
    """A version on this machine, and how it got there."""

    local: LocalPolicy
    """The version and its folder."""
    form: Form
    """`present`: it was there; `in_place`: the store's own folder; `deltas`, `whole` or `adapter`: what was read."""
    num_bytes: int = 0
    """Bytes read from stores."""
    doubts: tuple[str, ...] = ()
    """Why a better way was not taken, in the order tried."""


@dataclass(slots=True)
class _Chain:
    base: LocalPolicy | None
    """Local base; ``None``: the oldest link is whole in the store and is fetched first."""
    links: list[Policy] = field(default_factory=list)
    """Versions whose deltas are applied, oldest first."""
    anchor: Policy | None = None
    """Whole version in the store that the chain starts from when no base is here."""


def local_policy_folder(store: Store, policy: Policy) -> Path | None:
    """Return the folder from which an engine can load the policy without a copy, ``None`` if there is none.

    Args:
        store: Store that the policy was resolved in.
        policy: From ``storage.policies.resolve_policy`` on that store.
    """
    if not policy.is_whole:
        return None
    folder = store.local_path(f"{policy_folder(policy.run, policy.version)}/{policy.manifest.attempt}")
    return folder if folder is not None and folder.is_dir() else None


def fetch_policy(
    stores: Sequence[Store],
    wanted: Policy,
    folder: Path,
    bases: Sequence[LocalPolicy] = (),
    *,
    deltas: Path | None = None,
    link: Link | None = None,
    proved: Proved | None = None,
) -> FetchedPolicy:
    """Put a version's files into a local folder; a complete copy that is there already is reused.

    Args:
        stores: Where from, nearest first; a store that lacks the version, or has other weights under it, is left out.
        wanted: The version, as its home store has it.
        folder: Target; appears complete or not at all.
        bases: Versions on this machine from which deltas may start.
        deltas: Folder in which the deltas that were read are left (``delta_file``), and found again; default none.
        link: How the link to the stores is used: readers, rate, deadline.
        proved: Told of each file of a version that is fetched whole.

    Raises:
        CorruptObjectError: Bytes differ from what the manifests say, in every way tried.
        ObjectMissingError: No store has the version.
        TransferDeadlineError: The link's deadline passed; what arrived of a whole version is kept for the next call.
    """
    if folder.is_dir() and _is_complete(wanted, folder):
        return FetchedPolicy(LocalPolicy(wanted, folder), "present")
    doubts: list[str] = []
    last: CorruptObjectError | ObjectMissingError | None = None
    for store in stores:
        for form in _forms(wanted):
            try:
                policy = _same_policy(store, wanted)
                if form == "deltas":
                    read = _by_deltas(store, policy, folder, bases, deltas, link)
                else:
                    read = _whole(store, policy, folder, link, proved)
            except (CorruptObjectError, ObjectMissingError) as error:
                doubts.append(f"{form} from {store.url}: {error}")
                last = error
                continue
            return FetchedPolicy(LocalPolicy(policy, folder), form, read, tuple(doubts))
    if last is not None:
        raise last
    message = f"policy version {wanted.version} of run {wanted.run}: no store to fetch it from was given"
    raise ObjectMissingError(message)


def find_chain(store: Store, policy: Policy, bases: Sequence[LocalPolicy]) -> _Chain:
    """Return the deltas of a store that lead from a local base, or from a whole version of the store, to a policy.

    Raises:
        DeltaMismatchError: There is none, it is broken, too long, or no smaller than the whole; says which.
        ObjectMissingError: A version in between is gone.
    """
    local = {(base.policy.version, base.policy.weights_hash): base for base in bases}
    links = [policy]
    size = 0
    while True:
        link = links[0].delta
        if link is None:
            raise _no_chain(policy, f"version {links[0].version} has no delta")
        size += links[0].manifest.part(DELTA_PART).size
        if size > MAX_FRACTION * policy.size or len(links) > MAX_CHAIN:
            raise _no_chain(policy, f"{len(links)} deltas of {size} bytes are not worth it")
        if (base := local.get((link.base_version, link.base_weights_hash))) is not None:
            return _Chain(base, links)
        before = resolve_policy(store, policy.run, link.base_version)
        if before.weights_hash != link.base_weights_hash:
            raise _no_chain(policy, f"version {before.version} has other weights than the delta starts from")
        if before.is_whole and not policy.is_whole:
            return _Chain(None, links, before)
        links.insert(0, before)


def _forms(wanted: Policy) -> tuple[Literal["deltas", "whole", "adapter"], ...]:
    """Return the ways to fetch a version, best first; an adapter's files are small and taken as they are."""
    return ("deltas", "whole") if wanted.adapter is None else ("adapter",)


def _same_policy(store: Store, wanted: Policy) -> Policy:
    policy = resolve_policy(store, wanted.run, wanted.version)
    if policy.weights_hash != wanted.weights_hash:
        message = f"{store.url}/{policy.manifest.key} has other weights than version {wanted.version} has at home"
        raise CorruptObjectError(message, key=policy.manifest.key)
    return policy


def _by_deltas(
    store: Store, policy: Policy, folder: Path, bases: Sequence[LocalPolicy], kept: Path | None, link: Link | None
) -> int:
    chain = find_chain(store, policy, bases)
    read = sum(link.manifest.part(DELTA_PART).size for link in chain.links)
    with _appearing(folder) as temporary:
        work = temporary / ".work"
        work.mkdir()
        base = chain.base
        if base is None and chain.anchor is not None:
            base, whole = _anchor(store, chain.anchor, work / "anchor", link)
            read += whole
        if base is None:
            raise _no_chain(policy, "it starts from nothing")
        apply_policy_deltas(store, chain.links, base.weight_files(), kept or work, temporary, link)
        read += sum(_other_file(store, part, chain.links, base, temporary) for part in policy.files)
        shutil.rmtree(work)
    return read


def _anchor(store: Store, policy: Policy, folder: Path, link: Link | None) -> tuple[LocalPolicy, int]:
    in_place = local_policy_folder(store, policy)
    if in_place is not None:
        return LocalPolicy(policy, in_place), 0
    return LocalPolicy(policy, folder), _whole(store, policy, folder, link)


def _other_file(store: Store, part: Part, links: Sequence[Policy], base: LocalPolicy, target: Path) -> int:
    """Put a file that is no weights into the result, from the base if it is the same there; return bytes read."""
    if part.name.endswith(".safetensors"):
        return 0
    path = target / part.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if any(own.name == part.name and own.sha256 == part.sha256 for own in base.policy.files):
        shutil.copyfile(base.folder / part.name, path)
        found = sha256_of_file(path)
        if found != (part.size, part.sha256):
            message = f"{base.folder / part.name} is not what version {base.policy.version} consists of any more"
            raise CorruptObjectError(message, key=part.path)
        return 0
    for link in reversed(links):
        for stored in link.manifest.parts:
            if stored.name == part.name and stored.sha256 == part.sha256:
                download_part(store, stored, path)
                return stored.size
    raise DeltaMismatchError(f"file {part.name} is neither in the base nor beside a delta; take the whole version")


def _whole(store: Store, policy: Policy, folder: Path, link: Link | None, proved: Proved | None = None) -> int:
    if not policy.is_whole:
        message = f"{store.url}/{policy.manifest.key} is a copy that holds a delta only"
        raise ObjectMissingError(message, key=policy.manifest.key)
    with _appearing(folder) as temporary, arriving_folder(folder) as arriving:

        def tell(part: Part) -> None:
            if proved is not None:
                proved(part, arriving / part.name)

        try:
            with InBackground(tell) as telling:
                for part in policy.files:
                    if not (arriving / part.name).is_file():  # what an earlier call finished was compared then
                        download_part(store, part, arriving / part.name, link)
                    telling.give(part)
        except (CorruptObjectError, ObjectMissingError):
            shutil.rmtree(arriving)  # a next call has nothing to go on with
            raise
        for part in policy.files:
            (temporary / part.name).parent.mkdir(parents=True, exist_ok=True)
            (arriving / part.name).replace(temporary / part.name)
        shutil.rmtree(arriving)
    return policy.size


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Give a temporary folder that takes the place of ``folder`` at the end, or goes away on failure."""
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    with on_this_machine(folder):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            _put(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _put(temporary: Path, folder: Path) -> None:
    """Rename a folder to its place; one that is there, or that somebody else puts there now, goes."""
    while True:
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        else:
            return
        aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
        with suppress(FileNotFoundError):
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def _is_complete(policy: Policy, folder: Path) -> bool:
    return all(
        (folder / part.name).is_file() and sha256_of_file(folder / part.name) == (part.size, part.sha256)
        for part in policy.files
    )


def _no_chain(policy: Policy, why: str) -> DeltaMismatchError:
    message = f"policy version {policy.version} of run {policy.run} cannot be made from deltas: {why}"
    return DeltaMismatchError(message, key=policy.manifest.key)
