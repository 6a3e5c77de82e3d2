"""The entry of a training run in a deployment: what the Airflow side must know to build the run's DAG.

The run record in the object store is the truth about a run; the entry repeats the few facts that decide which task rows
exist, so that parsing a DAG needs one small local file and no object store.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails

from stages.errors import ContractError
from stages.home import MAX_ITERATIONS

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Run, machine, queue and region names become parts of DAG ids, task ids and object keys."""

_NAME_RULE = "names have 1 to 100 of A-Z a-z 0-9 . _ - and start with a letter or digit"


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class MachineEntry(_Document):
    """One machine: one task row per stage."""

    name: str = Field(pattern=NAME_PATTERN)
    """Name in the cluster file."""
    queue: str = Field(pattern=NAME_PATTERN)
    """Airflow queue."""
    region: str = Field(pattern=NAME_PATTERN)
    """Region that holds the machine."""


class RunEntry(_Document):
    """What the DAG of one training run is made from."""

    format: Literal["motley.run-entry/1"] = "motley.run-entry/1"
    run: str = Field(pattern=NAME_PATTERN)
    """Run name; the DAG id follows from it."""
    roots: dict[str, str]
    """Object-store root (fsspec URL) by region."""
    machines: tuple[MachineEntry, ...] = Field(min_length=1)
    """Machines in cluster order; the first does what is done once per iteration (plan, commit, evaluate, report)."""
    iterations: int = Field(ge=1, le=MAX_ITERATIONS)
    """Iterations of the run; raising it extends the run."""
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """PPO has a task row for each of its six tasks."""
    first_iteration: int = Field(default=0, ge=0)
    """First iteration of the run; above 0 in a fork, which goes on from a version of another run."""
    drained: tuple[str, ...] = ()
    """Machines that get no work; their rows wait for no worker of theirs."""
    reprofile_at: int = Field(default=0, ge=0)
    """Iteration at which all machines are measured again because the cluster changed; 0 is none."""
    max_staleness: int = Field(default=0, ge=0)
    """Policy versions a rollout may lag; 0 is synchronous."""
    generate_ahead: int | None = Field(default=None, ge=1)
    """Iterations that generation may run ahead of training; absent = `max_staleness`."""
    evaluate_every: int = Field(default=0, ge=0)
    """Evaluate after every n-th iteration and after the last one; 0 only after the last one."""
    profile_every: int = Field(default=0, ge=0)
    """Measure the machines at every n-th iteration; 0 only at the first one."""
    gate_deadline_s: float = Field(default=7 * 24 * 3600.0, gt=0)
    """Longest wait for a policy version."""
    stage_deadline_s: float = Field(default=3600.0, gt=0)
    """Longest run of one stage process."""
    has_quality_report: bool = False
    """Whether iterations are partitions of an asset, on which a second DAG reports."""
    stall_check_s: float | None = Field(default=None, gt=0)
    """Seconds after which an iteration is looked at that has not ended; null has Airflow not look."""
    storage_options: dict[str, JsonValue] = {}
    """Options for opening the object stores (fsspec); no secrets, those come from the environment or a connection."""
    storage_connections: dict[str, str] = {}
    """Airflow connection with the credentials of a region's store, by region."""

    @model_validator(mode="after")
    def _is_consistent(self) -> RunEntry:
        if missing := sorted({machine.region for machine in self.machines} - set(self.roots)):
            raise ValueError(f"roots lack the region(s) {missing} of machines")
        if unknown := sorted(set(self.storage_connections) - set(self.roots)):
            raise ValueError(f"storage_connections name the region(s) {unknown}, which have no root")
        for what in ("name", "queue"):
            values = [getattr(machine, what) for machine in self.machines]
            if len(set(values)) != len(values):
                raise ValueError(f"machines share a {what}: {values}; one task row per {what} is needed")
        if self.generate_ahead is not None and self.max_staleness == 0:
            raise ValueError(f"generate_ahead is {self.generate_ahead} in a synchronous run (max_staleness 0)")
        if self.first_iteration >= self.iterations:
            raise ValueError(f"first_iteration {self.first_iteration} is not below iterations {self.iterations}")
        names = {machine.name for machine in self.machines}
        if unknown := sorted(set(self.drained) - names):
            raise ValueError(f"drained names {unknown}, which are no machines of the run")
        if self.control.name in self.drained:
            raise ValueError(f"drained names {self.control.name}, which does what is done once per iteration")
        return self

    @property
    def lead(self) -> int:
        """Iterations that generation may run ahead of training; 0 in synchronous runs."""
        return self.max_staleness if self.generate_ahead is None else self.generate_ahead

    @property
    def control(self) -> MachineEntry:
        """Machine that does what is done once per iteration."""
        return self.machines[0]

    @property
    def num_dag_runs(self) -> int:
        """DAG runs of the whole run."""
        return self.iterations - self.first_iteration

    def queue_of(self, machine: MachineEntry) -> str:
        """Return the queue on which a machine's rows wait: a drained machine's are skipped on the control machine."""
        return self.control.queue if machine.name in self.drained else machine.queue

    @property
    def root(self) -> str:
        """Object-store root of the control machine's region: policies, plans and records are there."""
        return self.roots[self.control.region]

    @property
    def regions(self) -> tuple[str, ...]:
        """Regions that hold machines, in cluster order."""
        return tuple(dict.fromkeys(machine.region for machine in self.machines))

    def is_profile_due(self, iteration: int) -> bool:
        """Whether the machines are measured in an iteration."""
        is_regular = self.profile_every > 0 and iteration % self.profile_every == 0
        return iteration in (self.first_iteration, self.reprofile_at) or is_regular

    def is_evaluation_due(self, iteration: int) -> bool:
        """Whether the policy that an iteration made is evaluated: every n-th and the last one."""
        done = iteration + 1
        return done == self.iterations or (self.evaluate_every > 0 and done % self.evaluate_every == 0)

    def to_json(self) -> str:
        """Return the document as text, stable in order and layout."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


def run_name_fault(name: str) -> str | None:
    """Return why a run can't have a name, as a sentence; None where it can."""
    if re.fullmatch(NAME_PATTERN.strip("^$"), name):
        return None
    return f"run name is {name!r}, but {_NAME_RULE}; choose another one."


def entry_faults(error: ValidationError) -> list[str]:
    """Return what keeps a run from having an entry, one sentence each."""
    return [_entry_fault(fault) for fault in error.errors(include_url=False)]


def _entry_fault(fault: ErrorDetails) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).removeprefix(".")
    if fault["type"] == "string_pattern_mismatch":
        return f"{where} is {fault['input']!r}, but {_NAME_RULE}; choose another one."
    rule = fault["msg"].removeprefix("Value error, ")
    return f"{where} is {fault['input']!r}, but {rule[:1].lower() + rule[1:]}; correct it." if where else f"{rule}."


def read_run_entry(file: Path) -> RunEntry:
    """Return the entry that a file holds.

    Raises:
        ContractError: missing or unreadable file, or a document that is no run entry; names file and fields.
    """
    try:
        return RunEntry.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ContractError(
            f"run entry {file} can't be read: {error.strerror}; register the run again with `motley run`"
        ) from error
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'document'}: {fault['msg']}" for fault in error.errors()
        )
        raise ContractError(f"run entry {file} is unusable: {faults}; remove it or register the run again") from error


def list_run_entries(runs_dir: Path) -> list[Path]:
    """Return the files of all run entries, by name; none when the directory does not exist."""
    return sorted(runs_dir.glob("*.json"))
