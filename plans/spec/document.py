"""Text to a mapping of JSON values: the only reader of JSON and YAML in the planner.

Doubled keys, non-finite numbers, values of a type that JSON does not have, and documents without end are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable
from dataclasses import replace
from typing import cast

import yaml

from plans.errors import Fault, FaultKind, SpecError

MAX_DEPTH = 40
"""Levels of nesting that a document may have."""

MAX_VALUES = 3_000_000
"""Values that a document may have once aliases are unfolded; a link matrix of 1,500 machines has fewer."""


def parse_document(text: str, source_name: str) -> tuple[dict[str, object], list[Fault]]:
    """Return the mapping of a JSON or YAML text, made of JSON types and finite numbers only, and what was neither.

    A value that JSON does not have is null in the mapping, so that the rest can still be checked.

    Raises:
        SpecError: not readable, not a mapping, or doubled keys.
    """
    try:
        raw = _parse_json(text) if text.lstrip().startswith("{") else _parse_yaml(text)
        _refuse_endless(raw)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        detail = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        raise SpecError(
            source_name,
            [
                Fault(
                    field="",
                    found=f"unreadable ({detail})",
                    rule="it is one JSON or YAML document",
                    remedy="correct the syntax",
                    kind=FaultKind.SYNTAX,
                )
            ],
        ) from error
    if not isinstance(raw, dict):
        raise SpecError(
            source_name,
            [
                Fault(
                    field="",
                    found=show(raw),
                    rule="it is a mapping of fields",
                    remedy="write `field: value` entries",
                    kind=FaultKind.WRONG_TYPE,
                )
            ],
        )
    faults: list[Fault] = []
    return cast("dict[str, object]", _json_value(raw, "", faults)), faults


def show(value: object) -> str:
    """Return a value as a message shows it, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse_endless(raw: object) -> None:
    """Refuse a document that holds itself, or whose aliases unfold into more than any cluster or job needs.

    Raises:
        ValueError: It is nested too deeply, or too large.
    """
    pending, num_values = [(raw, 0)], 0
    while pending:
        value, depth = pending.pop()
        num_values += 1
        if depth > MAX_DEPTH or num_values > MAX_VALUES:
            what = f"more than {MAX_DEPTH} levels" if depth > MAX_DEPTH else f"more than {MAX_VALUES} values"
            raise ValueError(f"it unfolds into {what}; does an alias (*name) refer to what contains it?")
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        pending.extend((child, depth + 1) for child in children)


def _json_value(value: object, path: str, faults: list[Fault]) -> object:
    """Return a value with null in place of what JSON does not have, and note that."""
    if isinstance(value, dict):
        faults.extend(
            _value_fault(path, f"the key {key!r}", "keys are text", "put the key in quotes")
            for key in value
            if not isinstance(key, str)
        )
        return {
            str(key): _json_value(child, f"{path}.{key}" if path else str(key), faults) for key, child in value.items()
        }
    if isinstance(value, list):
        return [_json_value(child, f"{path}[{index}]", faults) for index, child in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        fault = _value_fault(path, str(value), "numbers are finite", "write a finite number")
        faults.append(replace(fault, kind=FaultKind.OUT_OF_RANGE))
        return None
    if value is not None and not isinstance(value, str | int | float | bool):
        found = f"{value} ({type(value).__name__})"
        faults.append(_value_fault(path, found, "values are JSON types", "put the value in quotes"))
        return None
    return value


def _value_fault(path: str, found: str, rule: str, remedy: str) -> Fault:
    return Fault(field=path, found=found, rule=rule, remedy=remedy, kind=FaultKind.WRONG_TYPE)


def _parse_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_unique_pairs)


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} is given twice")
        result[key] = value
    return result


class _StrictYamlLoader(yaml.SafeLoader):
    """Safe YAML that refuses doubled keys and deep nesting, and reads `1e9` as a number, as YAML 1.2 does."""

    flow_level: int  # kept by the scanner: brackets open so far

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Open a bracket; refuse too many at once, since the scanner looks at all open ones for every token."""
        if self.flow_level >= MAX_DEPTH:
            raise ValueError(f"it opens more than {MAX_DEPTH} brackets inside one another")
        super().fetch_flow_collection_start(token)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """Return the mapping of a node after checking that no key is given twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                line = node.value[index][0].start_mark.line + 1
                raise ValueError(f"the key {key!r} is given twice, again in line {line}")
        return super().construct_mapping(node, deep=deep)


_StrictYamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse_yaml(text: str) -> object:
    return yaml.load(text, Loader=_StrictYamlLoader)
