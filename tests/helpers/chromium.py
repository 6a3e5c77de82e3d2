"""A headless Chromium: Debian's, one that a variable names, or Playwright's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "MOTLEY_CHROMIUM"
"""Environment variable with the browser's executable."""


def executable() -> str | None:
    """Return the browser's executable; None where there is none."""
    named = os.environ.get(VARIABLE) or shutil.which("chromium") or shutil.which("google-chrome")
    if named is not None:
        return named
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


@contextmanager
def browser() -> Iterator[Any]:
    """Give a browser without a sandbox of its own: tests may run as root."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        try:
            yield launched
        finally:
            launched.close()
