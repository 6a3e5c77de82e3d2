"""Options and credentials of stores, by root, from the environment of the process.

``MOTLEY_STORAGE_OPTIONS`` is a JSON object: fsspec options (``endpoint_url``, ``key``, ``secret``, ``token`` ...) by
the URL of a root. Every process that opens a root below one of them gets its options, so no document, request or log
has to carry any. Whoever starts a stage process sets it; what is in it is never repeated in a message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from storage.errors import CredentialsError

OPTIONS_VARIABLE: Final = "MOTLEY_STORAGE_OPTIONS"
"""Environment variable with the options of every root."""


def options_of(url: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the options for the root at a URL: those of the longest root that it is or lies below.

    Args:
        url: URL of a root.
        environment: Default the process's own.

    Raises:
        CredentialsError: The variable is no JSON object of objects; its content is not shown.
    """
    roots = _roots(os.environ if environment is None else environment)
    wanted = url.rstrip("/") + "/"
    matching = [root for root in roots if wanted.startswith(root.rstrip("/") + "/")]
    return dict(roots[max(matching, key=len)]) if matching else {}


def options_variable(
    roots: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment that gives a process these options, added to those that are set already.

    Args:
        roots: Options by the URL of a root; empty ones add nothing.
        environment: Where options may be set already.

    Raises:
        CredentialsError: What is set already cannot be read.
    """
    merged = _roots({} if environment is None else environment)
    for root, options in roots.items():
        if options:
            merged[root] = {**merged.get(root, {}), **options}
    return {OPTIONS_VARIABLE: json.dumps(merged)} if merged else {}


def _roots(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    text = environment.get(OPTIONS_VARIABLE, "")
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None  # the error would quote the text, which holds secrets
    if not isinstance(found, dict) or not all(isinstance(options, dict) for options in found.values()):
        message = (
            f"environment variable {OPTIONS_VARIABLE} ({len(text)} characters) is no JSON object of options by root; "
            'write e.g. {"s3://bucket/rl": {"endpoint_url": "..."}}'
        )
        raise CredentialsError(message)
    return found
