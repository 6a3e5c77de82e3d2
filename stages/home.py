"""Where one deployment of Motley keeps its local files, and the clock that turns iterations into logical dates.

Shared by the command line (which writes these files) and the Airflow side (which reads them); neither imports the
other.

```
<home>/deployment.json        what `motley up` started
      /settings.yaml          what this deployment allows and whom it tells (stages.settings), written by its owner
      /airflow/               AIRFLOW_HOME: configuration, metadata database, task logs, component logs
      /runs/<run>.json        one entry per run: what the DAG factory needs (stages.run_entry)
      /state/<machine>/       job folders, engine registry and caches of a machine
      /store/                 default object-store root
      /workers/<machine>/     home of a machine's worker on this computer, with airflow/ and state/ of its own
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

HOME_VARIABLE = "MOTLEY_HOME"
"""Environment variable that names the home directory; absent means `~/.motley`."""

ENGINES_PYTHON_VARIABLE = "MOTLEY_ENGINES_PYTHON"
"""Environment variable that names the interpreter in which stage processes and engines run."""

DEPLOYMENT_VARIABLE = "MOTLEY_DEPLOYMENT"
"""Environment variable with the deployment's id, inherited by everything that a deployment starts."""

PART_VARIABLE = "MOTLEY_PART"
"""Environment variable that says to which part of a deployment a process belongs (`airflow` or `stage`)."""

WORKER_VARIABLE = "MOTLEY_WORKER"
"""Environment variable of an Edge worker: its machine as JSON (`machine`, `region`, `gpu`, `count`, `roots`)."""

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""Logical date of iteration 0."""

STEP = timedelta(minutes=1)
"""Distance of the logical dates of two iterations; all of them lie in the past, so every iteration is due at once."""

MAX_ITERATIONS = 10_000_000
"""Most iterations of a run: their logical dates reach into 2019, so all of them are due at once."""

DAG_PREFIX = "motley__"
"""Prefix of the DAG ids of training runs."""


@dataclass(frozen=True, slots=True)
class MotleyHome:
    """The local files of one deployment."""

    path: Path
    """Home directory, absolute."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> MotleyHome:
        """Return the home that the environment names, or the default one."""
        named = environment.get(HOME_VARIABLE)
        return cls(Path(named).expanduser().absolute() if named else Path.home() / ".motley")

    @property
    def deployment_file(self) -> Path:
        """What `motley up` started."""
        return self.path / "deployment.json"

    @property
    def settings_file(self) -> Path:
        """Settings of the deployment; need not exist."""
        return self.path / "settings.yaml"

    @property
    def airflow_dir(self) -> Path:
        """AIRFLOW_HOME of the embedded Airflow."""
        return self.path / "airflow"

    @property
    def runs_dir(self) -> Path:
        """Entries of the runs, one JSON file each."""
        return self.path / "runs"

    @property
    def store_dir(self) -> Path:
        """Object-store root of regions for which neither cluster nor job names one."""
        return self.path / "store"

    def worker_home(self, machine: str) -> MotleyHome:
        """Return the home of a machine's worker that runs on the deployment's own computer."""
        return MotleyHome(self.path / "workers" / machine)

    def run_entry_file(self, run: str) -> Path:
        """Return the file of a run's entry."""
        return self.runs_dir / f"{run}.json"

    def state_dir(self, machine: str) -> Path:
        """Return the local state directory of a machine."""
        return self.path / "state" / machine


def dag_id_of(run: str) -> str:
    """Return the DAG id of a run."""
    return f"{DAG_PREFIX}{run}"


def logical_date_of(iteration: int) -> datetime:
    """Return the logical date of an iteration: `EPOCH + iteration * STEP`."""
    if iteration < 0:
        raise ValueError(f"iteration {iteration} has no logical date: iterations count from 0")
    return EPOCH + iteration * STEP


def iteration_of(logical_date: datetime | None) -> int:
    """Return the iteration of a logical date; the inverse of `logical_date_of`.

    Raises:
        ValueError: no logical date (a manual run), or one that no iteration has.
    """
    if logical_date is None:
        raise ValueError(
            "the DAG run has no logical date, so it is no iteration; runs of this DAG come from its schedule or a "
            "backfill"
        )
    # Through time stamps: Airflow hands over pendulum dates, whose differences don't divide by a timedelta.
    number, rest = divmod(datetime.fromtimestamp(logical_date.timestamp(), UTC) - EPOCH, STEP)
    if rest or number < 0:
        raise ValueError(
            f"logical date {logical_date.isoformat()} belongs to no iteration: they are {EPOCH.isoformat()} + k min"
        )
    return number
