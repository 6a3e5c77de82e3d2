"""Reading the lines that a growing log file has gained."""

from __future__ import annotations

from pathlib import Path

_CHUNK_BYTES = 1 << 20


class LogTail:
    """Follows one file from its beginning; keeps an unfinished last line until it ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Return the complete lines written since the last call; none while the file does not exist."""
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                chunk = stream.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def remaining_lines(self) -> list[str]:
        """Return everything that is left, an unfinished last line included."""
        lines: list[str] = []
        while more := self.new_lines():
            lines.extend(more)
        rest, self._rest = self._rest, b""
        return [*lines, rest.decode("utf-8", "replace")] if rest else lines
