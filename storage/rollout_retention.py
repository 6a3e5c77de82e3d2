"""How long rollouts are kept: which iterations' rows go by a rule, and their removal.

Only iterations that are committed and reported may go, and of these never: the newest ones the rule keeps, those whose
groups wait in the buffer of a resume point (``needed``), and those that a live lease names. What goes is the training
split of an iteration with all its column families, in every region: first ``removed.json`` says so, then leases are
looked at once more, then manifests go before data, so no reader finds a manifest without rows. Records, metrics,
quality reports and evaluations stay. A pass that dies is taken up by the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from storage.errors import CorruptObjectError, InvalidInputError, InvalidNameError, ObjectMissingError
from storage.iterations import records_of
from storage.layout import Split, iteration_folder
from storage.leases import live_leases
from storage.manifest import Manifest, load_manifest
from storage.parsed_keys import Kind, ParsedKey, parse_key
from storage.policies import head_version
from storage.removed_rollouts import Removal, read_removals, write_removals
from storage.rollout_schema import Family
from storage.runs import IterationRecord
from storage.store import Store
from storage.superseded import superseded_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRule:
    """How long rollouts are kept; an iteration stays as long as either number keeps it."""

    keep_iterations: int | None = None
    """Newest committed iterations kept (>= 1); ``None`` = no such bound."""
    keep_days: float | None = None
    """Days kept since the iteration ended (>= 0); ``None`` = no such bound."""

    def __post_init__(self) -> None:
        """Refuse a rule without a bound, or with one out of range."""
        if self.keep_iterations is None and self.keep_days is None:
            raise InvalidInputError("a rule for rollouts needs keep_iterations, keep_days or both")
        if (self.keep_iterations or 1) < 1 or self.keep_iterations == 0 or (self.keep_days or 0.0) < 0:
            raise InvalidInputError(f"rule for rollouts {self} is refused: keep_iterations >= 1, keep_days >= 0")

    def __str__(self) -> str:
        """Say what is kept, in words."""
        newest = None if self.keep_iterations is None else f"the newest {self.keep_iterations} iterations"
        days = None if self.keep_days is None else f"iterations of the last {self.keep_days:g} days"
        return f"{' and '.join(part for part in (newest, days) if part)} are kept"


@dataclass(frozen=True, slots=True)
class OldRollouts:
    """One iteration whose rollouts a rule does not keep."""

    iteration: int
    """RL iteration."""
    rows: int
    """Completions."""
    size_bytes: int
    """Bytes of the rollouts and all column families."""
    why_kept: str | None = None
    """Why it stays nevertheless, in words; ``None``: it goes."""


def old_rollouts(
    stores: Sequence[Store],
    run: str,
    rule: RolloutRule,
    now: datetime,
    *,
    iterations: Iterable[int],
    needed: Collection[int],
) -> list[OldRollouts]:
    """Return the iterations that a rule does not keep and that have rows left, ascending; nothing is changed.

    Args:
        stores: Stores of all regions, that of the home region first.
        run: Run name.
        rule: What to keep.
        now: Current time, UTC, injected.
        iterations: Which iterations to look at.
        needed: Iterations with groups that a resume point's buffer holds.

    Raises:
        CorruptObjectError: Head, a lease, a record or ``removed.json`` cannot be read.
    """
    home = stores[0]
    removals = read_removals(home, run)
    left = [k for k in iterations if k not in removals or not removals[k].is_complete]
    leased = _leased(home, run, now)
    found = []
    for record in records_of(home, run, _beyond(home, run, rule, left)):
        if _is_young(record, rule, now):
            continue
        rows, size_bytes = _extent(stores, run, record.iteration)
        if not size_bytes and record.iteration not in removals:
            continue
        why = "its groups wait in the buffer of a resume point" if record.iteration in needed else None
        why = "a stage uses it" if why is None and record.iteration in leased else why
        found.append(OldRollouts(record.iteration, rows, size_bytes, why))
    return found


def remove_rollouts(
    stores: Sequence[Store], run: str, rule: RolloutRule, now: datetime, old: Sequence[OldRollouts]
) -> list[OldRollouts]:
    """Remove what :func:`old_rollouts` found and nothing keeps; return what is gone.

    Args:
        stores: Stores of all regions, that of the home region first.
        run: Run name.
        rule: For the record of why.
        now: Current time, UTC, injected.
        old: From :func:`old_rollouts`, just before.
    """
    home, doomed = stores[0], [entry for entry in old if entry.why_kept is None]
    if not doomed:
        return []
    before = read_removals(home, run)
    noted = before | {entry.iteration: _removal(entry, before, rule, now) for entry in doomed}
    _write_everywhere(stores, run, noted)
    late = _leased(home, run, now) & {entry.iteration for entry in doomed}  # a stage that came before it could see it
    gone = [entry for entry in doomed if entry.iteration not in late]
    spared = {store.url: superseded_parts(store, run) for store in stores}
    for entry in gone:
        for store in stores:
            _delete_rows(store, run, entry.iteration, spared[store.url])
    done = {entry.iteration: noted[entry.iteration].model_copy(update={"is_complete": True}) for entry in gone}
    kept = {k: removal for k, removal in noted.items() if k not in late or k in before}
    _write_everywhere(stores, run, kept | done)
    return gone


def _beyond(home: Store, run: str, rule: RolloutRule, iterations: Iterable[int]) -> list[int]:
    """Return the committed iterations beyond the newest ones kept."""
    head = head_version(home, run)
    end = 0 if head is None else head - (rule.keep_iterations or 1)
    return sorted(k for k in iterations if k < end)


def _is_young(record: IterationRecord, rule: RolloutRule, now: datetime) -> bool:
    if rule.keep_days is None:
        return False
    return record.ended_at is None or record.ended_at > now - timedelta(days=rule.keep_days)


def _leased(home: Store, run: str, now: datetime) -> set[int]:
    return {iteration for held in live_leases(home, run, now) for iteration in held.iterations}


def _removal(entry: OldRollouts, before: dict[int, Removal], rule: RolloutRule, now: datetime) -> Removal:
    """Return the note of a removal; one that an earlier pass began keeps the numbers of when all was there."""
    if entry.iteration in before:
        return before[entry.iteration]
    return Removal(removed_at=now, rule=str(rule), rows=entry.rows, size_bytes=entry.size_bytes)


def _extent(stores: Sequence[Store], run: str, iteration: int) -> tuple[int, int]:
    """Return rows and bytes of an iteration's training split in all regions; a replicated shard counts in each."""
    rows = size_bytes = 0
    for store in stores:
        for key in _training_keys(store, run, iteration)[0]:
            if (manifest := _manifest(store, key.rpartition("/")[0])) is not None:
                size_bytes += manifest.size
                is_rollouts = manifest.kind == Family.ROLLOUTS.value
                rows += sum(part.rows or 0 for part in manifest.parts) if is_rollouts else 0
    return rows, size_bytes


def _delete_rows(store: Store, run: str, iteration: int, spared: Collection[str]) -> None:
    """Delete the shards of an iteration, what dead attempts left there too; what rewinds set aside stays."""
    manifests, data = _training_keys(store, run, iteration)
    for key in (*manifests, *(key for key in data if key not in spared)):
        store.delete(key)


def _training_keys(store: Store, run: str, iteration: int) -> tuple[list[str], list[str]]:
    """Return manifests and data objects of an iteration's training split.

    Manifests of shard 0 come first, since readers begin there.
    """
    manifests, data = list[tuple[int, str]](), list[str]()
    for info in store.list(iteration_folder(run, iteration)):
        parsed = _training_shard(info.key)
        if parsed is not None and parsed.is_data:
            data.append(info.key)
        elif parsed is not None:
            manifests.append((parsed.shard or 0, info.key))
    return [key for _, key in sorted(manifests)], data


def _training_shard(key: str) -> ParsedKey | None:
    try:
        parsed = parse_key(key)
    except InvalidNameError:
        return None
    return parsed if parsed.kind is Kind.SHARD and parsed.split is Split.TRAIN else None


def _manifest(store: Store, folder: str) -> Manifest | None:
    """Return a manifest, ``None`` if it is gone or damaged."""
    try:
        return load_manifest(store, folder)
    except (ObjectMissingError, CorruptObjectError):
        return None


def _write_everywhere(stores: Iterable[Store], run: str, removals: dict[int, Removal]) -> None:
    for store in stores:
        write_removals(store, run, removals)
