"""Names that may be one segment of an object key, and any text made into one."""

from __future__ import annotations

import re

from storage.errors import InvalidNameError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~-]{0,126}\Z")
"""A segment of a key that somebody chose."""

NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})\Z")
"""A segment of a key that counts something."""

_KEPT = re.compile(r"[A-Za-z0-9_-]")


def check_name(name: str, what: str = "name") -> str:
    """Return ``name`` unchanged if it may be one segment of an object key.

    Args:
        name: 1 to 127 characters of ``A-Z a-z 0-9 . _ ~ -``, first one a letter, digit or underscore.
        what: What the name is of, for the message.

    Raises:
        InvalidNameError: The name breaks the rule.
    """
    if not isinstance(name, str) or not NAME.match(name):
        message = (
            f"{what} {name!r} cannot be part of an object key: 1 to 127 of A-Z a-z 0-9 . _ ~ - are allowed, "
            "starting with a letter, digit or underscore; choose another one (code that takes names from elsewhere: "
            "storage.names.escape_name)"
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
