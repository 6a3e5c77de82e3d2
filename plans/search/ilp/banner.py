"""HiGHS prints a banner on standard output when its first object is made; results go there, so it must not."""

from __future__ import annotations

import os
from functools import cache


@cache
def send_banner_to_stderr() -> None:
    """Make one HiGHS object while standard output points to standard error; does nothing without HiGHS."""
    try:
        import highspy
    except ImportError:
        return
    try:
        kept = os.dup(1)
    except OSError:  # no standard output: nothing to keep clean
        return
    try:
        os.dup2(2, 1)
        highspy.Highs()  # type: ignore[no-untyped-call]  # the package has no types
    finally:
        os.dup2(kept, 1)
        os.close(kept)
