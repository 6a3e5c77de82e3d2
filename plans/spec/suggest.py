"""The field that the author of a document probably meant by a name that the format does not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel

Node = Mapping[str, Any]

_MIN_LIKENESS = 0.6
"""Smallest likeness (difflib's ratio, 0 to 1) of a suggested name."""

_MAX_LISTED = 12
"""Allowed names that a message lists where none of them is near."""


def remedy_for_unknown(model: type[BaseModel], location: Sequence[int | str], others: Iterable[str] = ()) -> str:
    """Return what to do about an unknown field, with the nearest name that is allowed in its place.

    Args:
        model: Model of the whole document.
        location: Path of the unknown field as pydantic gives it, names of union branches included.
        others: Further names that are allowed at the top level.
    """
    names = {
        name for node in _nodes_at(model.model_json_schema(), location[:-1]) for name in node.get("properties", ())
    }
    names |= set(others) if len(location) == 1 else set()
    if location[-1] in names:  # of the other kind of thing that may stand here
        return "remove it, or the field that makes this another kind of entry"
    near = get_close_matches(str(location[-1]), sorted(names), n=1, cutoff=_MIN_LIKENESS)
    if near:
        return f"write {near[0]!r}, or remove the field"
    allowed = f" (allowed here: {', '.join(sorted(names))})" if 0 < len(names) <= _MAX_LISTED else ""
    return f"remove or correct the field's name{allowed}"


def _nodes_at(schema: Node, location: Sequence[int | str]) -> list[Node]:
    """Return the schemas of what lies at a path; several where the document may hold one of several models."""
    nodes = list(_unfolded(schema, schema))
    for part in location:
        children = [child for node in nodes for found in _children(node, part) for child in _unfolded(found, schema)]
        nodes = children or nodes  # the name of a union's branch is no part of the document
    return nodes


def _children(node: Node, part: int | str) -> Iterator[Node]:
    if isinstance(part, int):
        items = node.get("items")
        yield from [items] if isinstance(items, Mapping) else []
        yield from node.get("prefixItems", [])[part : part + 1]
    elif part in node.get("properties", {}):
        yield node["properties"][part]
    elif isinstance(node.get("additionalProperties"), Mapping):
        yield node["additionalProperties"]


def _unfolded(node: Node, schema: Node) -> Iterator[Node]:
    """Yield a schema itself, or what it refers to and the branches that it joins."""
    if "$ref" in node:
        yield from _unfolded(schema["$defs"][str(node["$ref"]).rsplit("/", 1)[-1]], schema)
        return
    branches = [branch for join in ("anyOf", "oneOf", "allOf") for branch in node.get(join, ())]
    if not branches:
        yield node
    for branch in branches:
        yield from _unfolded(branch, schema)
