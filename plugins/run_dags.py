"""The DAGs of a process: those of the run entries in its home, or, on a worker, the one whose task it is to run.

A worker may be far from the deployment and has no entries. It reads the run's record in the object store, of which the
entry is an extract, for every task anew: a run that was extended meanwhile is not missed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from airflow.sdk import DAG
from pydantic import ValidationError

from plugins.iteration_dag import PREFIXES, build_run_dags, dags_of
from stages.home import WORKER_VARIABLE, MotleyHome
from stages.run_entry import RunEntry, list_run_entries
from storage.errors import StorageError
from storage.runs import load_run
from storage.store import open_store

logger = logging.getLogger(__name__)


def find_run_dags(environment: Mapping[str, str], wanted: str | None) -> dict[str, DAG]:
    """Return the DAGs that this process can see, by DAG id.

    Args:
        environment: Environment of the process.
        wanted: The one DAG that is needed (a task is about to run), or None for all.
    """
    home = MotleyHome.from_environment(environment)
    found = build_run_dags(list_run_entries(home.runs_dir), wanted=wanted)
    prefix = next((known for known in PREFIXES if (wanted or "").startswith(known)), None)
    if found or wanted is None or WORKER_VARIABLE not in environment or prefix is None:
        return found
    roots = json.loads(environment[WORKER_VARIABLE])["roots"]
    entry = entry_in_roots(wanted.removeprefix(prefix), roots)
    return {} if entry is None else dags_of(entry, wanted)


def entry_in_roots(run: str, roots: list[str]) -> RunEntry | None:
    """Return the entry of a run from its record in the first root that has it; None, with a log line, if none has."""
    for root in roots:
        try:
            return RunEntry.model_validate(load_run(open_store(root), run).metadata.get("entry"))
        except (StorageError, ValidationError) as error:
            logger.warning("run %s is not in %s: %s", run, root, error)
    logger.error(
        "this worker knows no run %s: none of its roots (%s) has its record; start it with --root URL of the run's "
        "store",
        run,
        ", ".join(roots),
    )
    return None
