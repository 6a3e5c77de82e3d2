"""From what a person types for RUN to the store that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.errors import InputError
from stages.home import MotleyHome
from stages.run_entry import RunEntry, list_run_entries, read_run_entry
from storage.regional_view import run_stores, view_of
from storage.store import Store, open_store

RUN_HELP = "Run name in this deployment, or ROOT/NAME with the object-store root, e.g. s3://bucket/root/my-run."
"""Help text of every RUN argument."""


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run and where it lies."""

    name: str
    """Run name."""
    store: Store
    """Store of the control machine's region."""
    entry: RunEntry | None
    """The deployment's entry; None for a run that was given by its root."""

    def stores(self) -> list[Store]:
        """Return the stores of all its regions, `store` first.

        Raises:
            StorageError: the run's record can't be read.
        """
        options: dict[str, Any] = {} if self.entry is None else dict(self.entry.storage_options)
        return run_stores(self.store, self.name, **options)

    def rows_store(self) -> Store:
        """Return the stores of all its regions as one to read rows from: they lie where they were made."""
        return view_of(self.stores())


def find_run(argument: str, home: MotleyHome) -> FoundRun:
    """Return the run that an argument names.

    Raises:
        InputError: no such run in the deployment; names those there are.
        ContractError: the run's entry is unreadable.
    """
    root, slash, name = argument.rstrip("/").rpartition("/")
    if slash:
        return FoundRun(name=name, store=open_store(root if "://" in root else str(Path(root).absolute())), entry=None)
    file = home.run_entry_file(argument)
    if not file.exists():
        known = ", ".join(path.stem for path in list_run_entries(home.runs_dir)) or "none"
        raise InputError(
            f"There is no run {argument!r} in {home.path} (runs there: {known}); "
            "give one of these, another --home, or ROOT/NAME for a run elsewhere."
        )
    entry = read_run_entry(file)
    return FoundRun(name=entry.run, store=open_entry_store(entry), entry=entry)


def open_entry_store(entry: RunEntry) -> Store:
    """Open the store of an entry's control region with the entry's options."""
    options: dict[str, Any] = dict(entry.storage_options)
    return open_store(entry.root, **options)
