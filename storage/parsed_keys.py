"""What an object key names: the inverse of the key functions of `storage.layout`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from storage.errors import InvalidNameError
from storage.layout import MANIFEST_NAME, RESCORED_NAME, SCORES_NAME, Split, partition_folder
from storage.names import NAME, NUMBER

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~-]{0,131}\Z")
_SHARD = re.compile(r"shard-([0-9]{5,9})\Z")


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
    READER = "reader"
    RETENTION = "retention"
    REMOVED = "removed"
    METRICS = "metrics"
    SUPERSEDED = "superseded"
    ALERT = "alert"
    GANG = "gang"
    RESCORED = "rescored"


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
    """Queue of a profile, holder of a lease, machine of a reader (escaped), matter of an alert, task of a gang, name of
    scores, file name of a data object, or key of what a rewind set aside."""
    attempt: str | None = None
    """Attempt of a data object; ``None`` for the manifest of an artefact."""

    @property
    def is_data(self) -> bool:
        """Whether the key is a data object of an artefact (as against its manifest or a single document)."""
        return self.attempt is not None


def parse_key(key: str) -> ParsedKey:
    """Say what an object key names; the inverse of the key functions.

    Raises:
        InvalidNameError: No key function of `storage.layout` gives that key.
    """
    run, *rest = key.split("/")
    parsed = _parse_rest(run, rest) if NAME.match(run) and all(map(_SEGMENT.match, rest)) else None
    if parsed is None and NAME.match(run):
        parsed = _parse_rescored(run, rest)
    if parsed is None:
        message = f"object key {key!r} is none of Motley's layout"
        raise InvalidNameError(message, key=key)
    return parsed


_SINGLE = {
    "run.json": Kind.RUN_RECORD,
    "retention.json": Kind.RETENTION,
    "removed.json": Kind.REMOVED,
    "policies/head.json": Kind.POLICY_HEAD,
    "trainer/index.json": Kind.CHECKPOINT_INDEX,
}

_VERSIONED = {"policies": Kind.POLICY, "trainer": Kind.CHECKPOINT, "critics": Kind.CRITIC}

_NAMED = {"leases": Kind.LEASE, "readers": Kind.READER, "alerts": Kind.ALERT}


def _parse_rest(run: str, rest: list[str]) -> ParsedKey | None:
    if (kind := _SINGLE.get("/".join(rest))) is not None:
        return ParsedKey(kind=kind, run=run)
    match rest:
        case ["profiles", number, name] if NUMBER.match(number) and name.endswith(".json") and name != ".json":
            return ParsedKey(kind=Kind.PROFILE, run=run, number=int(number), name=name[:-5])
        case ["profiles" | "plans" as part, name] if name.endswith(".json") and NUMBER.match(name[:-5]):
            kind = Kind.PROFILE if part == "profiles" else Kind.PLAN
            return ParsedKey(kind=kind, run=run, number=int(name[:-5]))
        case ["leases" | "readers" | "alerts" as part, name] if name.endswith(".json"):
            return ParsedKey(kind=_NAMED[part], run=run, name=name[:-5])
        case ["superseded", number, *tail] if NUMBER.match(number):
            before = _parse_rest(run, tail)
            is_usable = before is not None and not before.is_data and before.kind is not Kind.SUPERSEDED
            named = ParsedKey(kind=Kind.SUPERSEDED, run=run, number=int(number), name="/".join(tail))
            return named if is_usable else None
        case ["metrics", *tail]:
            return _parse_artefact(ParsedKey(kind=Kind.METRICS, run=run), tail)
        case ["policies" | "trainer" | "critics" as part, number, *tail] if NUMBER.match(number):
            return _parse_artefact(ParsedKey(kind=_VERSIONED[part], run=run, number=int(number)), tail)
        case ["iterations", number, *tail] if NUMBER.match(number):
            return _parse_iteration(run, int(number), tail)
    return None


def _parse_rescored(run: str, rest: list[str]) -> ParsedKey | None:
    """Parse the keys whose folders are partitions, with ``=`` in their names."""
    match rest:
        case ["superseded", number, "rescored", *tail] if NUMBER.match(number):
            if _parse_rescored(run, ["rescored", *tail]) is not None:
                return ParsedKey(kind=Kind.SUPERSEDED, run=run, number=int(number), name="/".join(rest[2:]))
        case ["rescored", name, split, partition, file] if file == SCORES_NAME:
            if NAME.match(name) and split in set(Split) and partition == partition_folder(run):
                return ParsedKey(kind=Kind.RESCORED, run=run, name=name, split=Split(split))
        case ["rescored", *head, partition, file] if file == RESCORED_NAME:
            number = partition.removeprefix("iteration=")
            base = _parse_rescored(run, ["rescored", *head, SCORES_NAME])
            if base is not None and partition != number and NUMBER.match(number):
                return replace(base, number=int(number))
    return None


def _parse_iteration(run: str, iteration: int, rest: list[str]) -> ParsedKey | None:
    if rest == ["record.json"]:
        return ParsedKey(kind=Kind.ITERATION_RECORD, run=run, number=iteration)
    if rest == ["plan.json"]:
        return ParsedKey(kind=Kind.ITERATION_PLAN, run=run, number=iteration)
    if rest == ["quality.json"]:
        return ParsedKey(kind=Kind.QUALITY, run=run, number=iteration)
    if len(rest) in (3, 4) and rest[0] == "gangs" and rest[-1].endswith(".json"):
        is_gang = NUMBER.match(rest[2].removesuffix(".json")) and (len(rest) == 3 or not rest[2].endswith(".json"))
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
    if len(rest) < 2 or NUMBER.match(rest[0]) or rest[0].endswith(".json"):
        return None
    fields = {name: getattr(base, name) for name in ParsedKey.__slots__}
    return ParsedKey(**{**fields, "attempt": rest[0], "name": "/".join(rest[1:])})
