from __future__ import annotations

from pathlib import Path

from plugins.log_tail import LogTail


def test_tail_gives_each_complete_line_once(tmp_path: Path) -> None:
    file = tmp_path / "log"
    tail = LogTail(file)
    assert tail.new_lines() == []
    file.write_text("one\ntw")
    assert tail.new_lines() == ["one"]
    with file.open("a") as stream:
        stream.write("o\nthree")
    assert tail.new_lines() == ["two"]
    assert tail.remaining_lines() == ["three"]
    assert tail.remaining_lines() == []


def test_tail_keeps_going_over_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"a\xff\nb\n")
    assert LogTail(file).remaining_lines() == ["a\ufffd", "b"]
