"""The runs of a deployment, found by DAG id: entry, store, record and head, and the records of iterations.

A DAG id is the only name that comes from outside. It must be the prefix and a run name; the entry of that name in the
deployment's home then says where the run's objects lie.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from plans.spec.cluster import Cluster
from plans.spec.job import Job
from plans.spec.load import cluster_from_document, job_from_document
from plugins.pages.faults import PageError
from stages.home import DAG_PREFIX, MotleyHome
from stages.run_entry import NAME_PATTERN, RunEntry, list_run_entries, read_run_entry
from storage.errors import ObjectMissingError
from storage.iterations import records_of
from storage.layout import Split
from storage.policies import PolicyHead, read_head
from storage.regional_view import view_of
from storage.removed_rollouts import removal_sentence
from storage.rollouts import has_rollouts
from storage.runs import IterationRecord, RunRecord, load_run
from storage.store import Store, open_store

_MAX_CACHED: Final = 20_000
"""Iteration records that are kept in memory, a few kilobytes each."""

OptionsOf = Callable[[RunEntry, str], dict[str, Any]]
"""Returns the options (with credentials) of the store of a region, given the run's entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRun:
    """A run as this machine's files know it: enough for the frame of a page."""

    dag_id: str
    """DAG of the run."""
    entry: RunEntry
    """The deployment's entry."""

    @property
    def name(self) -> str:
        """Run name."""
        return self.entry.run


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRun(NamedRun):
    """A run with what its stores say."""

    store: Store
    """Store of the control machine's region, which holds policies, plans and records."""
    rows_store: Store
    """The stores of all regions as one: rows lie where they were made."""
    record: RunRecord
    """The run's record."""
    head: PolicyHead | None
    """Head of the policies; None before the first version."""

    @property
    def done(self) -> int:
        """Number of the first iteration that is not committed."""
        return self.entry.first_iteration if self.head is None else self.head.version

    @property
    def cluster(self) -> Cluster:
        """The run's machines; raises `SpecError`."""
        return cluster_from_document(self.record.cluster, f"{self.name}/run.json cluster")

    @property
    def job(self) -> Job:
        """The planner's part of the job; raises `SpecError`."""
        return job_from_document(self.record.job, f"{self.name}/run.json job")

    def check_rollouts(self, iteration: int, split: Split) -> None:
        """Raise a `PageError` with a sentence if an iteration has no rollouts to show."""
        what = f"Iteration {iteration} of run {self.name}"
        last = self.entry.iterations - (split is Split.TRAIN)
        if not self.entry.first_iteration <= iteration <= last:
            raise PageError(
                f"{what} does not exist: the run has iterations {self.entry.first_iteration} to "
                f"{self.entry.iterations - 1}; `motley extend {self.name} --iterations N` adds more."
            )
        if has_rollouts(self.rows_store, self.name, iteration, split=split):
            return
        if split is Split.EVAL:
            raise PageError(
                f"Policy version {iteration} of run {self.name} was not evaluated (yet): the job evaluates after every "
                f"{self.entry.evaluate_every or 'last'} iteration."
            )
        if iteration < self.done:
            if (sentence := removal_sentence(self.store, self.name, iteration)) is not None:
                raise PageError(f"{sentence[0].upper()}{sentence[1:]}.", HTTPStatus.GONE)
            raise PageError(
                f"{what} is done, but its rollouts are not in {self.store.url} any more: they were removed by "
                f"retention or by hand; `motley verify {self.name}` says what is left.",
                HTTPStatus.GONE,
            )
        raise PageError(f"{what} has no rollouts yet: the run is at iteration {self.done}; look again later.")


class RunSource:
    """Finds the runs of one deployment and keeps the records of their iterations."""

    def __init__(self, home: MotleyHome, options_of: OptionsOf) -> None:
        """Keep where the entries are and how stores are opened."""
        self._home = home
        self._options_of = options_of
        self._records: dict[tuple[str, str, int, int], IterationRecord] = {}
        self._lock = threading.Lock()

    def named(self, dag_id: str) -> NamedRun:
        """Return the run of a DAG; reads no store.

        Raises:
            PageError: the DAG is no run of this deployment.
        """
        name = dag_id.removeprefix(DAG_PREFIX)
        if name == dag_id or not re.fullmatch(NAME_PATTERN.strip("^$"), name):
            raise PageError(f"DAG {dag_id!r} is no run of Motley: their ids are {DAG_PREFIX}<run name>.")
        file = self._home.run_entry_file(name)
        if not file.is_file():
            known = ", ".join(path.stem for path in list_run_entries(self._home.runs_dir)) or "none"
            raise PageError(f"This deployment has no run {name!r} (runs: {known}).")
        return NamedRun(dag_id=dag_id, entry=read_run_entry(file))

    def find(self, run: NamedRun) -> PageRun:
        """Return a run with its record and head, read now.

        Raises:
            PageError: its record is gone.
        """
        entry = run.entry
        store = open_store(entry.root, **self._options_of(entry, entry.control.region))
        try:
            record = load_run(store, entry.run)
        except ObjectMissingError as error:
            raise PageError(f"Run {run.name} has an entry in this deployment, but {error}.") from error
        others = {root: region for region, root in entry.roots.items() if root != entry.root}
        opened = [open_store(root, **self._options_of(entry, region)) for root, region in others.items()]
        return PageRun(
            dag_id=run.dag_id, entry=entry, store=store, rows_store=view_of([store, *opened]), record=record,
            head=read_head(store, entry.run),
        )  # fmt: skip

    def runs(self) -> list[RunEntry]:
        """Return the entries of all runs, by name."""
        return [read_run_entry(file) for file in list_run_entries(self._home.runs_dir)]

    def records(self, run: PageRun, iterations: Iterable[int] | None = None) -> list[IterationRecord]:
        """Return the records of reported iterations, ascending; default those of all committed ones.

        A record never changes once it is written, but a rewind makes it anew: the number of rewinds is part of the key
        under which it is kept.
        """
        wanted = list(range(run.entry.first_iteration, run.done) if iterations is None else iterations)
        lineage = 0 if run.head is None else len(run.head.rollbacks)
        keys = {k: (run.store.url, run.name, lineage, k) for k in wanted}
        with self._lock:
            found = {k: self._records[key] for k, key in keys.items() if key in self._records}
        for record in records_of(run.store, run.name, [k for k in wanted if k not in found]):
            found[record.iteration] = record
        with self._lock:
            if len(self._records) + len(found) > _MAX_CACHED:
                self._records.clear()
            self._records |= {keys[k]: record for k, record in found.items()}
        return [found[k] for k in sorted(found)]
