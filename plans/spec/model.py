"""Base of every document model, and the fingerprint of a document's content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class SpecModel(BaseModel):
    """Frozen value type: unknown keys and non-finite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def canonical_json(content: Mapping[str, object]) -> str:
    """Return the one JSON text of a content: sorted keys, no spaces, finite numbers only."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def fingerprint(content: Mapping[str, object]) -> str:
    """Return the SHA-256 (hex) of a document's semantic content."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()
