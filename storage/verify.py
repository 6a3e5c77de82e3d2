"""Check of every committed artefact of a run against its manifest, and of what belongs together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pydantic import BaseModel

from storage import layout
from storage.adapter_policies import base_of
from storage.alerts import ALERT_FORMAT, Alert
from storage.checkpoints import INDEX_FORMAT, CheckpointIndex
from storage.critics import resolve_critic
from storage.documents import check_format, parse_json, read_model
from storage.errors import InvalidNameError, ObjectMissingError, StorageError
from storage.layout import Split
from storage.leases import LEASE_FORMAT, RETENTION_FORMAT, Lease, RetentionLedger
from storage.manifest import Manifest, check_schema_version, load_manifest, part_faults
from storage.near_parts import near_parts
from storage.parquet_io import decode_table, read_table
from storage.parsed_keys import Kind, ParsedKey, parse_key
from storage.policies import HEAD_FORMAT, PolicyHead, resolve_policy
from storage.posix_store import TEMPORARY_PREFIX
from storage.reading_turns import READER_FORMAT, Reader
from storage.regional_view import view_of
from storage.removed_rollouts import REMOVED_FORMAT, RemovedRollouts
from storage.rollout_schema import COLUMNS, SCHEMA_VERSION, Family
from storage.rollouts import read_rollouts
from storage.runs import ITERATION_FORMAT, ITERATION_PLAN_FORMAT, RUN_FORMAT, IterationPlan, IterationRecord, RunRecord
from storage.scores import SCORES_FORMAT, ScoresRecord
from storage.store import Store

_MODELS: dict[Kind, tuple[type[BaseModel], str]] = {
    Kind.RUN_RECORD: (RunRecord, RUN_FORMAT),
    Kind.ITERATION_RECORD: (IterationRecord, ITERATION_FORMAT),
    Kind.ITERATION_PLAN: (IterationPlan, ITERATION_PLAN_FORMAT),
    Kind.POLICY_HEAD: (PolicyHead, HEAD_FORMAT),
    Kind.CHECKPOINT_INDEX: (CheckpointIndex, INDEX_FORMAT),
    Kind.LEASE: (Lease, LEASE_FORMAT),
    Kind.ALERT: (Alert, ALERT_FORMAT),
    Kind.READER: (Reader, READER_FORMAT),
    Kind.RETENTION: (RetentionLedger, RETENTION_FORMAT),
    Kind.RESCORED: (ScoresRecord, SCORES_FORMAT),
    Kind.REMOVED: (RemovedRollouts, REMOVED_FORMAT),
}

Progress = Callable[[int, int, str], None]
"""Called with (checks done, checks in all, object key)."""


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Committed data is damaged or missing."""
    WARNING = "warning"
    """Something lies there that nobody reads: an attempt that never committed, an unknown object."""


def _ignore_progress(done: int, total: int, key: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    severity: Severity
    """How bad it is."""
    key: str
    """Object key."""
    message: str
    """A sentence."""


@dataclass(slots=True)
class VerifyReport:
    """Outcome of a verification."""

    num_artefacts: int = 0
    """Manifests checked."""
    num_documents: int = 0
    """Single JSON documents checked."""
    num_parts: int = 0
    """Data objects checked."""
    size_bytes: int = 0
    """Bytes of the data objects checked."""
    findings: list[Finding] = field(default_factory=list)
    """Everything found, in the order of the keys."""

    def add(self, other: VerifyReport) -> None:
        """Take in what was found in another region's store."""
        self.num_artefacts += other.num_artefacts
        self.num_documents += other.num_documents
        self.num_parts += other.num_parts
        self.size_bytes += other.size_bytes
        self.findings += other.findings

    @property
    def is_good(self) -> bool:
        """Whether there is no error (warnings are allowed)."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)


def verify_run(
    store: Store,
    run: str,
    *,
    others: Sequence[Store] = (),
    is_hash_checked: bool = True,
    progress: Progress = _ignore_progress,
) -> VerifyReport:
    """Check a run: every document, every manifest with its parts, the rows, and what joins them.

    Args:
        store: Where the run lies.
        run: Run name.
        others: Stores of the run's other regions, where shards lie too. With any, findings name their store.
        is_hash_checked: Read every byte and compare SHA-256; otherwise sizes, footers and rows only.
        progress: Told about every check, store by store.

    Raises:
        ObjectMissingError: There is nothing of that run in one of the stores.
        StoreAccessError: A store itself cannot be used.
    """
    stores = (store, *others)
    report = VerifyReport()
    keys: set[str] = set()
    for place in stores:
        one, found = _verify_store(place, run, is_hash_checked=is_hash_checked, progress=progress)
        if others:
            one.findings = [replace(finding, key=f"{place.url}/{finding.key}") for finding in one.findings]
        report.add(one)
        keys.update(found)
    _check_joins(view_of(stores), run, keys, report)
    return report


def _verify_store(
    store: Store, run: str, *, is_hash_checked: bool, progress: Progress
) -> tuple[VerifyReport, list[str]]:
    """Check what one store has of a run by itself; return its keys too."""
    keys = [info.key for info in store.list(layout.run_folder(run))]
    if not keys:
        message = f"{store.url} has nothing of run {run!r}; `motley runs` lists those there are"
        raise ObjectMissingError(message, key=layout.run_folder(run))
    report = VerifyReport()
    named: set[str] = set()
    data: list[str] = []
    for done, key in enumerate(keys):
        progress(done, len(keys), key)
        parsed = _parsed(key, report)
        if parsed is None:
            continue
        if parsed.is_data:
            data.append(key)
        elif key.endswith(f"/{layout.MANIFEST_NAME}"):
            named |= _check_artefact(store, key, parsed, report, is_hash_checked=is_hash_checked)
        else:
            check = _check_scores if key.endswith(f"/{layout.RESCORED_NAME}") else _check_document
            check(store, key, parsed, report)
    uncommitted = "belongs to an attempt that never committed, or that a later one replaced"
    report.findings += [Finding(Severity.WARNING, key, uncommitted) for key in data if key not in named]
    if layout.run_record(run) not in keys:
        report.findings.append(Finding(Severity.ERROR, layout.run_record(run), "the run record is missing"))
    progress(len(keys), len(keys), "")
    return report, keys


def _parsed(key: str, report: VerifyReport) -> ParsedKey | None:
    try:
        return parse_key(key)
    except InvalidNameError:
        is_temporary = key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)
        what = (
            "is a temporary file of a writer that died or is writing now" if is_temporary else "is none of the layout"
        )
        report.findings.append(Finding(Severity.WARNING, key, what))
        return None


def _check_artefact(
    store: Store, key: str, parsed: ParsedKey, report: VerifyReport, *, is_hash_checked: bool
) -> set[str]:
    """Check one manifest and its parts; return the data objects that it names."""
    try:
        manifest = load_manifest(store, key.rpartition("/")[0])
        faults = _part_and_content_faults(store, key, parsed, manifest, is_hash_checked=is_hash_checked)
    except StorageError as error:
        if store.exists(key):  # else retention has deleted the artefact meanwhile
            report.num_artefacts += 1
            report.findings.append(Finding(Severity.ERROR, key, str(error)))
        return set()
    paths = {part.path for part in manifest.parts}
    if faults and not store.exists(key):
        return paths
    report.num_artefacts += 1
    report.num_parts += len(manifest.parts)
    report.size_bytes += manifest.size
    report.findings += [Finding(Severity.ERROR, key, fault) for fault in faults]
    return paths


def _part_and_content_faults(
    store: Store, key: str, parsed: ParsedKey, manifest: Manifest, *, is_hash_checked: bool
) -> list[str]:
    """Check the parts of an artefact, its place and what is inside it; rows are hashed and decoded from one reading."""
    is_read_twice = is_hash_checked and parsed.kind is Kind.SHARD
    with near_parts(store, manifest) if is_read_twice else nullcontext(store) as near:
        faults = part_faults(near, manifest, is_hash_checked=is_hash_checked)
        if parsed.kind is Kind.SUPERSEDED:
            if manifest.key != f"{layout.run_folder(parsed.run)}/{parsed.name}":
                faults.append(f"it was set aside, but was written as {manifest.key}")
        elif manifest.key != key:
            faults.append(f"it was written as {manifest.key}")
        if not faults:
            faults += _content_faults(near, parsed, manifest)
    return faults


def _content_faults(store: Store, parsed: ParsedKey, manifest: Manifest) -> Iterator[str]:
    """Check what is inside the parts, by kind."""
    try:
        if parsed.kind is Kind.SHARD:
            family = Family(parsed.family or "")
            check_schema_version(manifest, SCHEMA_VERSION)
            required = [column.name for column in COLUMNS[family] if column.is_required]
            for part in manifest.parts:
                read_table(store, part, family, required)
        elif parsed.kind is Kind.POLICY and parsed.number is not None:
            policy = resolve_policy(store, parsed.run, parsed.number)
            if policy.adapter is not None:
                base_of(store, policy)
        elif parsed.kind is Kind.CRITIC and parsed.number is not None:
            resolve_critic(store, parsed.run, parsed.number)
    except (StorageError, ValueError) as error:
        yield str(error)


def _check_document(store: Store, key: str, parsed: ParsedKey, report: VerifyReport) -> None:
    report.num_documents += 1
    try:
        if parsed.kind in _MODELS:
            model, expected = _MODELS[parsed.kind]
            read_model(store, key, model, expected)
            if parsed.kind is Kind.POLICY_HEAD:
                resolve_policy(store, parsed.run)
        else:
            document = parse_json(store.read_bytes(key), key, store.url)
            if parsed.kind is Kind.PLAN:
                check_format(document, "motley.plan/1", key, store.url)
    except ObjectMissingError as error:
        if parsed.kind not in (Kind.LEASE, Kind.READER):  # what was given back meanwhile is no fault
            report.findings.append(Finding(Severity.ERROR, key, str(error)))
    except StorageError as error:
        report.findings.append(Finding(Severity.ERROR, key, str(error)))


def _check_scores(store: Store, key: str, _: ParsedKey, report: VerifyReport) -> None:
    """Check that a table of scores, which no manifest names, can be read."""
    report.num_documents += 1
    try:
        decode_table(store.read_bytes(key), f"{store.url}/{key}")
    except StorageError as error:
        report.findings.append(Finding(Severity.ERROR, key, str(error)))


def _check_joins(store: Store, run: str, keys: Iterable[str], report: VerifyReport) -> None:
    """Check of every iteration that all shards are there, no row is doubled and the families join."""
    present: dict[tuple[int, Split], set[Family]] = {}
    for key in keys:
        parsed = _shard_of(key)
        if parsed is not None and parsed.number is not None:
            present.setdefault((parsed.number, parsed.split), set()).add(Family(parsed.family or ""))
    for (iteration, split), families in sorted(present.items()):
        joined = sorted(families - {Family.ROLLOUTS})
        if _join_fault(store, run, iteration, split, joined) is None:
            continue
        for family in sorted(families):  # one by one: whose fault it is
            one = [] if family is Family.ROLLOUTS else [family]
            if (fault := _join_fault(store, run, iteration, split, one)) is not None:
                folder = layout.shard_folder(run, iteration, family.value, 0, split).rpartition("/")[0]
                report.findings.append(Finding(Severity.ERROR, folder, fault))


def _join_fault(store: Store, run: str, iteration: int, split: Split, families: Sequence[Family]) -> str | None:
    """Return why rollouts and families can't be read together, None if they can."""
    try:
        read_rollouts(store, run, iteration, columns=["row_id"], families=families, split=split)
    except StorageError as error:
        return str(error)
    return None


def _shard_of(key: str) -> ParsedKey | None:
    try:
        parsed = parse_key(key)
    except InvalidNameError:
        return None
    is_known = parsed.kind is Kind.SHARD and not parsed.is_data and parsed.family in set(Family)
    return parsed if is_known else None
