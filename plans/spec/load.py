"""The one loader: JSON or YAML text -> cluster or job (plan: `plans.plan_load`), all faults reported at once.

Text in, value out: reading files is the caller's work. Only this module and `plans.spec.document` handle raw mappings.
Unknown keys and unknown formats are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TypeVar, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from plans.errors import Fault, FaultKind, SpecError
from plans.spec.cluster import PATTERNS, Cluster
from plans.spec.cluster_rules import cluster_faults
from plans.spec.document import parse_document, show
from plans.spec.job import EXECUTION_SECTIONS, Job, job_faults
from plans.spec.model import SpecModel
from plans.spec.suggest import remedy_for_unknown

ModelT = TypeVar("ModelT", bound=SpecModel)
Location = tuple[int | str, ...]

_KINDS = {
    "missing": FaultKind.MISSING,
    "extra_forbidden": FaultKind.UNKNOWN_FIELD,
    "literal_error": FaultKind.OUT_OF_RANGE,
    "enum": FaultKind.OUT_OF_RANGE,
    "finite_number": FaultKind.OUT_OF_RANGE,
    "greater_than": FaultKind.OUT_OF_RANGE,
    "greater_than_equal": FaultKind.OUT_OF_RANGE,
    "less_than": FaultKind.OUT_OF_RANGE,
    "less_than_equal": FaultKind.OUT_OF_RANGE,
    "too_short": FaultKind.OUT_OF_RANGE,
    "too_long": FaultKind.OUT_OF_RANGE,
    "string_pattern_mismatch": FaultKind.OUT_OF_RANGE,
    "value_error": FaultKind.CONFLICT,
}
_REMEDIES = {
    FaultKind.MISSING: "add the field",
    FaultKind.UNKNOWN_FIELD: "remove or correct the field's name",
    FaultKind.WRONG_TYPE: "write a value of that type",
    FaultKind.OUT_OF_RANGE: "write an allowed value",
    FaultKind.CONFLICT: "correct the entry",
}
_MAX_PRUNE_ROUNDS = 50


def load_cluster(text: str, source_name: str) -> Cluster:
    """Return the cluster of a document.

    Args:
        text: JSON or YAML.
        source_name: the name that messages use, normally the file's path.

    Raises:
        SpecError: with every fault of the document.
    """
    return load_text(text, source_name, cluster_from_document)


def load_job(text: str, source_name: str) -> Job:
    """Return the planner's part of a job document; raises SpecError with every fault of the document."""
    return load_text(text, source_name, job_from_document)


def load_text(text: str, source_name: str, from_document: Callable[[Mapping[str, object], str], ModelT]) -> ModelT:
    """Return what a text describes; values that JSON does not have are reported together with all other faults.

    Args:
        text: JSON or YAML.
        source_name: The name that messages use.
        from_document: Makes the value of a parsed document.

    Raises:
        SpecError: with every fault.
    """
    document, faults = parse_document(text, source_name)
    if not faults:
        return from_document(document, source_name)
    fields = {fault.field for fault in faults}
    try:
        from_document(document, source_name)
    except SpecError as error:
        # What holds a value that became null is not judged without it.
        others = [fault for fault in error.faults if not any(_holds(fault.field, field) for field in fields)]
        faults.extend(_without_consequences(others, faults))
    raise SpecError(source_name, faults)


def cluster_from_document(document: Mapping[str, object], source_name: str) -> Cluster:
    """Return the cluster of a parsed document; raises SpecError with every fault."""
    names, pairs, types = _raw_machine_names(document), _raw_region_pairs(document), _raw_type_names(document)
    return build(Cluster, document, source_name, lambda cluster: cluster_faults(cluster, names, pairs, types))


def job_from_document(document: Mapping[str, object], source_name: str) -> Job:
    """Return the planner's part of a parsed job document; raises SpecError with every fault."""
    planner = {key: value for key, value in document.items() if key not in EXECUTION_SECTIONS}
    sections = {key: value for key, value in document.items() if key in EXECUTION_SECTIONS}
    if "execution" in planner:  # the name of our own container, not a section of the file
        raise SpecError(source_name, [_unknown_key("execution")])
    return build(Job, planner | ({"execution": sections} if sections else {}), source_name, job_faults)


def build(
    model: type[ModelT],
    document: Mapping[str, object],
    source_name: str,
    cross_faults: Callable[[ModelT], Sequence[Fault]],
) -> ModelT:
    """Validate a document field by field and across fields; report everything together.

    When single fields are at fault, the entries that hold them are set aside and the rest is still checked across
    fields, so that one run of the command shows all there is to correct.

    Raises:
        SpecError: with every fault.
    """
    value, faults = _validate(model, document)
    if value is not None:
        faults.extend(cross_faults(value))
        if not faults:
            return value
    else:
        rest, origins = _prune_until_valid(model, document)
        if rest is not None:
            found = [_with_original_indices(fault, origins) for fault in cross_faults(rest)]
            faults.extend(_without_consequences(found, faults))
    raise SpecError(source_name, faults)


def _without_consequences(found: Sequence[Fault], faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults that are not only there because a field at fault was set aside: it, or one of its parts."""
    wrong = [fault.field for fault in faults]
    return [
        fault
        for fault in found
        if not any(f"{field}.".startswith(f"{place}.") for place in (fault.field, *fault.reads) for field in wrong)
    ]


def _validate(model: type[ModelT], document: Mapping[str, object]) -> tuple[ModelT | None, list[Fault]]:
    if "format" not in document:
        default = model.model_fields["format"].default
        fault = Fault(
            field="format",
            found="missing",
            rule=f"it is {default!r}",
            remedy=f"add format: {default}",
            kind=FaultKind.MISSING,
        )
        _, others = _validate(model, {**document, "format": default})
        return None, [fault, *others]
    try:
        return model.model_validate_json(json.dumps(document), strict=True), []
    except ValidationError as error:
        details = _without_echoes(error.errors(include_url=False))
        return None, _merge_union_faults([_fault_of(detail, model) for detail in details])


def _without_echoes(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop what pydantic says of a list's length because entries of it are at fault."""
    places = [detail["loc"] for detail in details]
    return [
        detail
        for detail in details
        if detail["type"] != "too_short"
        or not any(len(place) > len(detail["loc"]) and place[: len(detail["loc"])] == detail["loc"] for place in places)
    ]


def _fault_of(detail: ErrorDetails, model: type[SpecModel]) -> Fault:
    kind = _KINDS.get(detail["type"], FaultKind.WRONG_TYPE)
    location = _clean(detail["loc"])
    found = "missing" if kind is FaultKind.MISSING else show(detail["input"])
    rule = _rule_of(detail)
    remedy = _REMEDIES[kind]
    if kind is FaultKind.UNKNOWN_FIELD:
        rule, found = "this format has no such field", "given"
        remedy = remedy_for_unknown(model, detail["loc"], EXECUTION_SECTIONS if model is Job else ())
    return Fault(field=_path(location), found=found, rule=rule, remedy=remedy, kind=kind)


def _rule_of(detail: ErrorDetails) -> str:
    """Return pydantic's rule in the words of a document's author."""
    limits = detail.get("ctx", {})
    if detail["type"] == "too_short":
        return f"it has {limits['min_length']} or more entries"
    if detail["type"] == "too_long":
        return f"it has {limits['max_length']} entries at most"
    if detail["type"] == "string_pattern_mismatch" and limits["pattern"] in PATTERNS:
        return PATTERNS[limits["pattern"]]
    rule = detail["msg"][:1].lower() + detail["msg"][1:]
    rule = rule.removeprefix("value error, ").replace("input should", "it should")
    return rule.replace("field required", "it is required").replace("it should be True", "it should be true")


def _merge_union_faults(faults: list[Fault]) -> list[Fault]:
    """Drop what pydantic repeats for each branch of a union: equal messages, and the whole beside its parts."""
    deeper = tuple(f.field for f in faults)
    return [
        fault
        for fault in dict.fromkeys(faults)
        if fault.kind is not FaultKind.WRONG_TYPE or not any(f.startswith(f"{fault.field}.") for f in deeper)
    ]


def _clean(location: Location) -> Location:
    """Drop pydantic's names of union branches, which are not part of the document."""
    return tuple(part for part in location if not (isinstance(part, str) and part in _UNION_BRANCHES))


_UNION_BRANCHES = frozenset({"ModelSpec", "VerifierSpec", "LlmShape", "str"})


def _holds(place: str, field: str) -> bool:
    """Tell whether a place of a document is a field or holds it."""
    return field == place or field.startswith((f"{place}.", f"{place}["))


def _path(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text.removesuffix(".[key]")


def _unknown_key(name: str) -> Fault:
    return Fault(
        field=name,
        found="given",
        rule="this format has no such field",
        remedy="remove or correct the field's name",
        kind=FaultKind.UNKNOWN_FIELD,
    )


def _prune_until_valid(
    model: type[ModelT], document: Mapping[str, object]
) -> tuple[ModelT | None, dict[str, list[int]]]:
    """Return the model of what is left when faulty entries are removed, or None if too little is left.

    Beside it, for each list that lost entries: the original index of each entry that is left.
    """
    default = model.model_fields["format"].default
    rest = cast("dict[str, object]", json.loads(json.dumps({**document, "format": default})))
    origins: dict[str, list[int]] = {}
    for _ in range(_MAX_PRUNE_ROUNDS):
        try:
            return model.model_validate_json(json.dumps(rest), strict=True), origins
        except ValidationError as error:
            cuts = {_cut(_clean(d["loc"]), d["type"]) for d in error.errors(include_url=False)}
            # From the back, so that removing one list entry does not shift the next one.
            ordered = sorted(cuts, key=lambda cut: tuple(str(part).zfill(9) for part in cut), reverse=True)
            if sum(_remove(rest, cut, origins) for cut in ordered) == 0:
                return None, origins
    return None, origins


def _cut(location: Location, error_type: str) -> Location:
    """Return where to cut for a fault: the list entry that holds it, or the field itself."""
    last_index = max((i for i, part in enumerate(location) if isinstance(part, int)), default=None)
    return location if error_type == "extra_forbidden" or last_index is None else location[: last_index + 1]


def _remove(root: dict[str, object], cut: Location, origins: dict[str, list[int]]) -> bool:
    """Remove what lies at a location; tell whether anything was removed, and note the indices of what is left."""
    if not cut:
        return False
    target: object = root
    for part in cut[:-1]:
        target = _child(target, part)
    key = cut[-1]
    if isinstance(target, dict) and key in target:
        del target[key]
        return True
    if isinstance(target, list) and isinstance(key, int) and key < len(target):
        del origins.setdefault(_path(cut[:-1]), list(range(len(target))))[key]
        del target[key]
        return True
    return False


def _with_original_indices(fault: Fault, origins: Mapping[str, Sequence[int]]) -> Fault:
    """Return the fault with the index that its list entry has in the author's document."""
    for path, indices in origins.items():
        match = re.match(rf"{re.escape(path)}\[(\d+)\]", fault.field)
        if match:
            return replace(fault, field=f"{path}[{indices[int(match[1])]}]{fault.field[match.end() :]}")
    return fault


def _child(value: object, part: int | str) -> object:
    if isinstance(value, dict):
        return value.get(part)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return None


def _raw_machine_names(document: Mapping[str, object]) -> list[str]:
    machines = document.get("machines")
    if not isinstance(machines, list):
        return []
    return [m["name"] for m in machines if isinstance(m, dict) and isinstance(m.get("name"), str)]


def _raw_region_pairs(document: Mapping[str, object]) -> list[frozenset[str]]:
    links = _child(_child(document, "links"), "regions")
    pairs = [_child(link, "between") for link in links] if isinstance(links, list) else []
    return [frozenset(two) for pair in pairs if isinstance(pair, list) for two in combinations(map(str, pair), 2)]


def _raw_type_names(document: Mapping[str, object]) -> list[str]:
    types = document.get("gpu_types")
    return list(types) if isinstance(types, dict) else []
