"""What the documents say can be typed, opened or set is there: commands, options, files, links, targets, variables."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.app import build_app
from stages.contract import StageName

ROOT = Path(__file__).parents[2]
TRACKED = frozenset(
    subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
)
DOCUMENTS = sorted(
    name
    for name in TRACKED
    if name.endswith(".md") and not name.startswith("docs/experiments/") and name != "CLAUDE.md"
)
TOP_FOLDERS = {name.split("/")[0] for name in TRACKED if "/" in name}
PRESENT = [name for name in DOCUMENTS if name != "CHANGELOG.md"]
"""Documents that describe the present, not what once was."""
INTERNAL_VARIABLES = {"MOTLEY_DEPLOYMENT", "MOTLEY_PART"}
"""Set by a deployment for its own processes."""

FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def command_lines(document: str) -> Iterator[str]:
    """Yield what a reader may type: lines of code blocks (continued ones joined), and code inside sentences."""
    text = text_of(document)
    for block in FENCE.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from SPAN.findall(FENCE.sub("", text))


def words(line: str) -> list[str]:
    """Return a command line's words, without variables before it and without a comment behind it."""
    line = re.sub(r"\s#.*$", "", line.strip()).removeprefix("$ ")
    try:
        found = shlex.split(line)
    except ValueError:  # code of another kind
        return []
    while found and re.match(r"[A-Z_]+=", found[0]):
        found.pop(0)
    return found


@cache
def program() -> Any:
    return typer.main.get_command(build_app())


def command_faults(parts: list[str]) -> list[str]:
    """Return what `motley` does not have of a command line; choices such as `up / down` are taken apart."""
    faults, command = [], program()
    while parts and hasattr(command, "commands"):
        if parts[0].startswith("-") or not re.fullmatch(r"[a-z][a-z-]*", parts[0]):
            break
        if parts[0] not in command.commands:
            return [f"no command {parts[0]!r}"]
        command = command.commands[parts.pop(0)]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for part in parts:
        name = part.strip("[](),").partition("=")[0]
        if re.fullmatch(r"--?[a-z][a-z-]*", name) and name not in options | {"--help"}:
            faults.append(f"`motley {command.name}` has no option {name!r}")
    return faults


@pytest.mark.parametrize("document", PRESENT)
def test_every_command_and_option_exists(document: str) -> None:
    faults = []
    for line in command_lines(document):
        parts = words(line)
        if not parts or parts[0].rpartition("/")[2] != "motley" or len(parts) == 1:
            continue
        for choice in line.split(" / ") if " / " in line else [line]:
            chosen = words(choice)
            faults += [
                f"{line}: {fault}" for fault in command_faults(chosen[1:] if chosen[0].endswith("motley") else chosen)
            ]
    assert faults == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_stage_target_and_module_exists(document: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", text_of("Makefile"), re.MULTILINE))
    stages = {name.value for name in StageName} | {"check", "NAME"}
    faults = []
    for line in command_lines(document):
        parts = words(line)
        if parts[:1] == ["make"]:
            faults += [f"{line}: no target {part}" for part in parts[1:] if "=" not in part and part not in targets]
        if "-m" in parts and parts[parts.index("-m") + 1 :][:1] == ["stages"]:
            named = [part.strip("),") for part in parts[parts.index("-m") + 2 :][:1]]
            faults += [f"{line}: no stage {part}" for part in named if part not in stages]
        elif (
            "-m" in parts and (module := parts[parts.index("-m") + 1 :][:1]) and module[0].split(".")[0] in TOP_FOLDERS
        ):
            path = module[0].replace(".", "/")
            if not {f"{path}.py", f"{path}/__main__.py"} & TRACKED:
                faults.append(f"{line}: no module {module[0]}")
    assert faults == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_of_the_repository_that_is_named_is_there(document: str) -> None:
    """A name with a star or a placeholder stands for several files; one with a line number for that line."""
    folders = {"/".join(name.split("/")[:depth]) for name in TRACKED for depth in range(1, name.count("/") + 1)}
    missing = []
    for line in command_lines(document):
        for word in re.split(r"[\s,;()'\"=]+", line):
            name = word.rstrip("/.:").partition(":")[0]
            is_path = name.split("/")[0] in TOP_FOLDERS and re.fullmatch(r"[\w./-]+", name) and "/" in name
            if is_path and ".." not in name and name not in TRACKED | folders and f"{name}.py" not in TRACKED:
                missing.append(word)
    assert missing == []


@pytest.mark.parametrize("document", [*DOCUMENTS, "docs/experiments/LOG.md"])
def test_every_link_leads_somewhere(document: str) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", text_of(document))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / document).parent / name if name else ROOT / document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(file: Path) -> set[str]:
    """Return the anchors of a document's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_variable_that_is_read_is_explained_and_every_explained_one_is_read() -> None:
    code = "".join(
        text_of(name) for name in TRACKED if name.endswith((".py", "Makefile")) and not name.startswith("tests/")
    )
    read = set(re.findall(r"\b(?<!\$)MOTLEY_[A-Z_]+\b", code)) - INTERNAL_VARIABLES
    explained = {name for document in DOCUMENTS for name in re.findall(r"\bMOTLEY_[A-Z_]+\b", text_of(document))}
    assert sorted(read - explained) == []
    assert sorted(explained - read) == []


@pytest.mark.parametrize("path", [[], *([name] for name in program().commands)], ids=lambda path: " ".join(path) or "-")
def test_every_command_and_option_has_a_help_text(path: list[str]) -> None:
    command = program().commands[path[0]] if path else program()
    commands = [command, *getattr(command, "commands", {}).values()] if path else [command]
    for one in commands:
        assert one.help, f"{one.name} has no help"
        untold = [p.name for p in one.params if getattr(p, "help", "") in (None, "") and p.name != "help"]
        assert untold == [], f"options of {one.name} without help"
