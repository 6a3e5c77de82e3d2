"""Every object key of a region's root as a function, the inverse parser, and the rules for names.

Keys are relative to the store's root, use ``/`` and hold no empty, ``.`` or ``..`` segment. An *artefact* is a
folder with one ``manifest.json`` and, per attempt, one folder of data objects::

    <run>/run.json
    <run>/profiles/<n>.json                 or <run>/profiles/<n>/<queue>.json
    <run>/plans/<n>.json
    <run>/iterations/<k>/record.json
    <run>/iterations/<k>/quality.json
    <run>/iterations/<k>/gangs/<task>/<epoch>.json and .../<epoch>/<machine>.json
    <run>/iterations/<k>/[eval/]<family>/shard-<s>/manifest.json
    <run>/iterations/<k>/[eval/]<family>/shard-<s>/<attempt>/rows.parquet
    <run>/policies/head.json
    <run>/policies/<v>/manifest.json        and <run>/policies/<v>/<attempt>/<file>
    <run>/trainer/index.json
    <run>/trainer/<v>/manifest.json         and <run>/trainer/<v>/<attempt>/<file>
    <run>/leases/<holder>.json
    <run>/retention.json
    <run>/alerts/<matter>.json
    <run>/metrics/manifest.json             and <run>/metrics/<attempt>/metrics.parquet
    <run>/superseded/<n>/<key of a manifest or record>

The run's name is the first segment of every key, so a fresh run can never pick up another run's objects.
For evaluations ``<k>`` is the policy version that was evaluated (version k is the policy that iteration k starts
from), so the initial policy has a place at ``iterations/0/eval`` and the final one at ``iterations/<N>/eval``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from storage.errors import InvalidNameError

MANIFEST_NAME = "manifest.json"
"""File name of the one object that makes an artefact visible."""

ROWS_NAME = "rows.parquet"
"""File name of the data object of a rollout or column-family shard."""

METRICS_NAME = "metrics.parquet"
"""File name of the data object of the exported metrics."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~-]{0,126}\Z")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~-]{0,131}\Z")
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})\Z")
_SHARD = re.compile(r"shard-([0-9]{5,9})\Z")
_KEPT = re.compile(r"[A-Za-z0-9_-]")


class Split(StrEnum):
    """What a rollout was made for."""

    TRAIN = "train"
    """Trained on."""

    EVAL = "eval"
    """Held-out measurement; never trained on."""


class Kind(StrEnum):
    """What an object key names."""

    RUN_RECORD = "run_record"
    PROFILE = "profile"
    PLAN = "plan"
    ITERATION_RECORD = "iteration_record"
    ITERATION_PLAN = "iteration_plan"
    QUALITY = "quality"
    SHARD = "shard"
    POLICY_HEAD = "policy_head"
    POLICY = "policy"
    CHECKPOINT_INDEX = "checkpoint_index"
    CHECKPOINT = "checkpoint"
    CRITIC = "critic"
    LEASE = "lease"
    RETENTION = "retention"
    METRICS = "metrics"
    SUPERSEDED = "superseded"
    ALERT = "alert"
    GANG = "gang"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedKey:
    """The parts of an object key; the inverse of the key functions."""

    kind: Kind
    """What the key names."""
    run: str
    """Run name."""
    number: int | None = None
    """Iteration, policy version, profile or plan number, or number of the rewind, whichever the kind has."""
    family: str | None = None
    """Column family of a shard."""
    split: Split = Split.TRAIN
    """Train or eval, for shards."""
    shard: int | None = None
    """Shard index, for shards."""
    name: str | None = None
    """Queue of a profile, holder of a lease, matter of an alert, task of a gang, file name of a data object, or key of
    what a rewind set aside."""
    attempt: str | None = None
    """Attempt of a data object; ``None`` for the manifest of an artefact."""

    @property
    def is_data(self) -> bool:
        """Whether the key is a data object of an artefact (as against its manifest or a single document)."""
        return self.attempt is not None


def check_name(name: str, what: str = "name") -> str:
    """Return ``name`` unchanged if it may be one segment of an object key.

    Args:
        name: 1 to 127 characters of ``A-Z a-z 0-9 . _ ~ -``, first one a letter, digit or underscore.
        what: What the name is of, for the message.

    Raises:
        InvalidNameError: The name breaks the rule.
    """
    if not isinstance(name, str) or not _NAME.match(name):
        message = (
            f"{what} {name!r} cannot be part of an object key: 1 to 127 of A-Z a-z 0-9 . _ ~ - are allowed, "
            "starting with a letter, digit or underscore; choose another one (code that takes names from elsewhere: "
            "storage.layout.escape_name)"
        )
        raise InvalidNameError(message)
    return name


def escape_name(text: str) -> str:
    """Turn any text into a safe key segment, injectively: other bytes become ``~`` and two hex digits.

    Args:
        text: Any non-empty text, e.g. a data set's problem id ``../../etc``.

    Raises:
        InvalidNameError: Empty, or longer than 127 characters once escaped.
    """
    escaped = "".join(char if _KEPT.match(char) else _escaped(char) for char in text)
    if escaped.startswith("-"):
        escaped = "~2d" + escaped[1:]
    return check_name("_" + escaped if escaped.startswith(("_", "~")) else escaped, "escaped name")


def unescape_name(name: str) -> str:
    """Return the text that :func:`escape_name` turned into ``name``."""
    body = name[1:] if name.startswith("_") else name
    raw = re.sub(r"~([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), body)
    return raw.encode("latin-1").decode("utf-8", "surrogatepass")


def _escaped(char: str) -> str:
    return "".join(f"~{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))


def _number(value: int, what: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        message = f"{what} {value!r} cannot be part of an object key: a whole number >= 0 is needed"
        raise InvalidNameError(message)
    return str(value)


def run_folder(run: str) -> str:
    """Folder of a run."""
    return check_name(run, "run name")


def run_record(run: str) -> str:
    """Key of the run record."""
    return f"{run_folder(run)}/run.json"


def profile(run: str, number: int, queue: str | None = None) -> str:
    """Key of profile ``number``: the whole cluster's, or one queue's own measurement (one writer per object)."""
    base = f"{run_folder(run)}/profiles/{_number(number, 'profile number')}"
    return f"{base}.json" if queue is None else f"{base}/{check_name(queue, 'queue')}.json"


def plan(run: str, number: int) -> str:
    """Key of plan ``number``."""
    return f"{run_folder(run)}/plans/{_number(number, 'plan number')}.json"


def iteration_folder(run: str, iteration: int) -> str:
    """Folder of an iteration: its record, rollouts and column families."""
    return f"{run_folder(run)}/iterations/{_number(iteration, 'iteration')}"


def iteration_record(run: str, iteration: int) -> str:
    """Key of the record of an iteration."""
    return f"{iteration_folder(run, iteration)}/record.json"


def iteration_plan(run: str, iteration: int) -> str:
    """Key of the document that says which plan an iteration uses."""
    return f"{iteration_folder(run, iteration)}/plan.json"


def quality_report(run: str, iteration: int) -> str:
    """Key of the quality report of an iteration."""
    return f"{iteration_folder(run, iteration)}/quality.json"


def gang_epoch(run: str, iteration: int, task: str, epoch: int) -> str:
    """Key that says that an epoch of a task's gang has begun."""
    return f"{iteration_folder(run, iteration)}/gangs/{check_name(task, 'task')}/{_number(epoch, 'epoch')}.json"


def gang_member(run: str, iteration: int, task: str, epoch: int, machine: str) -> str:
    """Key of what a member of a gang says of itself."""
    return f"{gang_epoch(run, iteration, task, epoch).removesuffix('.json')}/{escape_name(machine)}.json"


def shard_folder(run: str, iteration: int, family: str, shard: int, split: Split | str = Split.TRAIN) -> str:
    """Folder (artefact) of one shard of the rollouts or of a column family."""
    base = iteration_folder(run, iteration)
    part = "eval/" if Split(split) is Split.EVAL else ""
    index = int(_number(shard, "shard"))
    return f"{base}/{part}{check_name(family, 'family')}/shard-{index:05d}"


def policy_head(run: str) -> str:
    """Key of the document that names the authoritative policy version."""
    return f"{run_folder(run)}/policies/head.json"


def policies_folder(run: str) -> str:
    """Folder of all policy versions."""
    return f"{run_folder(run)}/policies"


def policy_folder(run: str, version: int) -> str:
    """Folder (artefact) of one policy version."""
    return f"{policies_folder(run)}/{_number(version, 'policy version')}"


def checkpoints_folder(run: str) -> str:
    """Folder of all resume points."""
    return f"{run_folder(run)}/trainer"


def checkpoint_index(run: str) -> str:
    """Key of the index of committed resume points."""
    return f"{checkpoints_folder(run)}/index.json"


def checkpoint_folder(run: str, version: int) -> str:
    """Folder (artefact) of one resume point."""
    return f"{checkpoints_folder(run)}/{_number(version, 'checkpoint version')}"


def critics_folder(run: str) -> str:
    """Folder of all critic versions."""
    return f"{run_folder(run)}/critics"


def critic_folder(run: str, version: int) -> str:
    """Folder (artefact) of one critic version: weights and resume point together (PPO)."""
    return f"{critics_folder(run)}/{_number(version, 'critic version')}"


def leases_folder(run: str) -> str:
    """Folder of all readers' leases."""
    return f"{run_folder(run)}/leases"


def lease(run: str, holder: str) -> str:
    """Key of one reader's lease."""
    return f"{leases_folder(run)}/{check_name(holder, 'lease holder')}.json"


def retention_ledger(run: str) -> str:
    """Key of the document that names versions about to be deleted."""
    return f"{run_folder(run)}/retention.json"


def alerts_folder(run: str) -> str:
    """Folder of what people were told of a run."""
    return f"{run_folder(run)}/alerts"


def alert(run: str, matter: str) -> str:
    """Key of the last alert about one matter."""
    return f"{alerts_folder(run)}/{check_name(matter, 'matter of an alert')}.json"


def metrics_folder(run: str) -> str:
    """Folder (artefact) of the exported metrics."""
    return f"{run_folder(run)}/metrics"


def superseded_folder(run: str) -> str:
    """Folder of everything that rewinds have set aside."""
    return f"{run_folder(run)}/superseded"


def superseded(run: str, rewind: int, key: str) -> str:
    """Key of a manifest or record that the run's n-th rewind has set aside.

    Args:
        run: Run name.
        rewind: Number of the rewind, from 1.
        key: Its key before, without the run's folder.
    """
    return f"{superseded_folder(run)}/{_number(rewind, 'rewind')}/{key}"


def manifest_key(folder: str) -> str:
    """Key of the manifest of an artefact."""
    return f"{folder}/{MANIFEST_NAME}"


def data_key(folder: str, attempt: str, name: str) -> str:
    """Key of a data object of one attempt at an artefact.

    Args:
        folder: The artefact's folder.
        attempt: Attempt token, unique per try, so no two tries ever write the same object.
        name: File name; may hold ``/`` for sub-folders, each segment a valid name.
    """
    segments = "/".join(check_name(segment, "file name") for segment in name.split("/"))
    return f"{folder}/{check_attempt(attempt)}/{segments}"


def check_attempt(attempt: str) -> str:
    """Return ``attempt`` unchanged if it may name an attempt folder (it must not be a plain number)."""
    if _NUMBER.match(check_name(attempt, "attempt")) or attempt.endswith(".json"):
        message = f"attempt {attempt!r} is refused: a plain number or *.json could be taken for another object"
        raise InvalidNameError(message)
    return attempt


def parse_key(key: str) -> ParsedKey:
    """Say what an object key names; the inverse of the key functions.

    Raises:
        InvalidNameError: No key function of this module gives that key.
    """
    run, *rest = key.split("/")
    parsed = _parse_rest(run, rest) if _NAME.match(run) and all(_SEGMENT.match(part) for part in rest) else None
    if parsed is None:
        message = f"object key {key!r} is none of Motley's layout"
        raise InvalidNameError(message, key=key)
    return parsed


_SINGLE = {
    "run.json": Kind.RUN_RECORD,
    "retention.json": Kind.RETENTION,
    "policies/head.json": Kind.POLICY_HEAD,
    "trainer/index.json": Kind.CHECKPOINT_INDEX,
}

_VERSIONED = {"policies": Kind.POLICY, "trainer": Kind.CHECKPOINT, "critics": Kind.CRITIC}


def _parse_rest(run: str, rest: list[str]) -> ParsedKey | None:
    if (kind := _SINGLE.get("/".join(rest))) is not None:
        return ParsedKey(kind=kind, run=run)
    match rest:
        case ["profiles", number, name] if _NUMBER.match(number) and name.endswith(".json") and name != ".json":
            return ParsedKey(kind=Kind.PROFILE, run=run, number=int(number), name=name[:-5])
        case ["profiles" | "plans" as part, name] if name.endswith(".json") and _NUMBER.match(name[:-5]):
            kind = Kind.PROFILE if part == "profiles" else Kind.PLAN
            return ParsedKey(kind=kind, run=run, number=int(name[:-5]))
        case ["leases", name] if name.endswith(".json"):
            return ParsedKey(kind=Kind.LEASE, run=run, name=name[:-5])
        case ["alerts", name] if name.endswith(".json"):
            return ParsedKey(kind=Kind.ALERT, run=run, name=name[:-5])
        case ["superseded", number, *tail] if _NUMBER.match(number):
            before = _parse_rest(run, tail)
            is_usable = before is not None and not before.is_data and before.kind is not Kind.SUPERSEDED
            named = ParsedKey(kind=Kind.SUPERSEDED, run=run, number=int(number), name="/".join(tail))
            return named if is_usable else None
        case ["metrics", *tail]:
            return _parse_artefact(ParsedKey(kind=Kind.METRICS, run=run), tail)
        case ["policies" | "trainer" | "critics" as part, number, *tail] if _NUMBER.match(number):
            return _parse_artefact(ParsedKey(kind=_VERSIONED[part], run=run, number=int(number)), tail)
        case ["iterations", number, *tail] if _NUMBER.match(number):
            return _parse_iteration(run, int(number), tail)
    return None


def _parse_iteration(run: str, iteration: int, rest: list[str]) -> ParsedKey | None:
    if rest == ["record.json"]:
        return ParsedKey(kind=Kind.ITERATION_RECORD, run=run, number=iteration)
    if rest == ["plan.json"]:
        return ParsedKey(kind=Kind.ITERATION_PLAN, run=run, number=iteration)
    if rest == ["quality.json"]:
        return ParsedKey(kind=Kind.QUALITY, run=run, number=iteration)
    if len(rest) in (3, 4) and rest[0] == "gangs" and rest[-1].endswith(".json"):
        is_gang = _NUMBER.match(rest[2].removesuffix(".json")) and (len(rest) == 3 or not rest[2].endswith(".json"))
        return ParsedKey(kind=Kind.GANG, run=run, number=iteration, name=rest[1]) if is_gang else None
    split = Split.EVAL if len(rest) > 3 and rest[0] == "eval" and _SHARD.match(rest[2]) else Split.TRAIN
    rest = rest[1:] if split is Split.EVAL else rest
    if len(rest) < 3 or not (found := _SHARD.match(rest[1])):
        return None
    shard = int(found[1])
    if f"shard-{shard:05d}" != rest[1]:
        return None
    base = ParsedKey(kind=Kind.SHARD, run=run, number=iteration, family=rest[0], split=split, shard=shard)
    return _parse_artefact(base, rest[2:])


def _parse_artefact(base: ParsedKey, rest: list[str]) -> ParsedKey | None:
    if rest == [MANIFEST_NAME]:
        return base
    if len(rest) < 2 or _NUMBER.match(rest[0]) or rest[0].endswith(".json"):
        return None
    fields = {name: getattr(base, name) for name in ParsedKey.__slots__}
    return ParsedKey(**{**fields, "attempt": rest[0], "name": "/".join(rest[1:])})
