"""What commands print: the result on standard output (text or one JSON document), the rest on standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

PIPED_WIDTH = 160
"""Columns of tables that go to a file or pipe, which has no width of its own."""


class Output:
    """Printer of one command."""

    def __init__(self, *, is_json: bool) -> None:
        """Choose the form of the result."""
        self.is_json = is_json
        width = None if sys.stdout.isatty() else PIPED_WIDTH
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True, width=width)
        self.progress_console = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    @property
    def is_interactive(self) -> bool:
        """Whether a person watches standard error."""
        return self.progress_console.is_terminal

    def progress(self, line: str) -> None:
        """Print a line of progress."""
        self.progress_console.print(line, markup=False)

    def result(self, document: dict[str, Any], text: str) -> None:
        """Print the result of the command."""
        if self.is_json:
            sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
            sys.stdout.flush()
        else:
            self.console.print(text, markup=False)
