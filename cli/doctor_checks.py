"""Checks of an installation, a deployment and a cluster's workers; each says what was found and what to do."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cli.deployment_api import AirflowApi
from cli.deployment_checks import MIN_FREE_BYTES, airflow_python, check_home, engines_python
from cli.deployment_processes import running_components
from cli.deployment_record import COMPONENTS, DeploymentRecord, read_record
from cli.deployment_workers import GONE_STATES, is_running, seconds_since, worker_log
from cli.errors import CommandError
from plans.spec.cluster import Cluster
from stages.errors import ContractError
from stages.home import MotleyHome
from stages.run_entry import list_run_entries, read_run_entry
from stages.settings import read_settings, settings_file

ENGINE_LIBRARIES = ("torch", "transformers", "accelerate", "safetensors")
"""What every engines' environment needs."""

SILENT_S = 120.0
"""Age of a worker's last heartbeat from which it counts as silent."""


class Verdict(StrEnum):
    """How a check ended."""

    GOOD = "good"
    NOTE = "note"
    """Nothing is broken, but somebody may want to know."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    """What was checked."""
    verdict: Verdict
    """How it ended."""
    found: str
    """What is so."""
    remedy: str | None = None
    """What to do; None when it is good."""


def good(check: str, found: str) -> Finding:
    """Return a finding without a remedy."""
    return Finding(check, Verdict.GOOD, found)


def bad(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that needs somebody."""
    return Finding(check, Verdict.BAD, found, remedy)


def note(check: str, found: str, remedy: str | None = None) -> Finding:
    """Return a finding that somebody may want to know."""
    return Finding(check, Verdict.NOTE, found, remedy)


def check_installation(
    home: MotleyHome, record: DeploymentRecord | None, environment: Mapping[str, str]
) -> list[Finding]:
    """Check interpreters, libraries, home directory, disk and run entries."""
    findings = [good("Python", f"{sys.version.split()[0]} at {sys.executable}")]
    findings.append(_attempt("Airflow", lambda: _airflow_facts(environment), "run `make env`"))
    has_edge = importlib.util.find_spec("airflow") is None or _has_edge()
    findings.append(
        good("Edge provider", "workers of several machines can be used")
        if has_edge
        else note("Edge provider", "apache-airflow-providers-edge3 is missing: one machine only", "run `make env`")
    )
    findings.append(_check_engines(record, environment))
    findings.append(_attempt("home directory", lambda: _home_facts(home), "set MOTLEY_HOME to another directory"))
    findings.append(_attempt("deployment record", lambda: _record_facts(home), "move the file away, then `motley up`"))
    findings.append(_settings(environment))
    findings += _entry_findings(home)
    return findings


def check_deployment(home: MotleyHome, record: DeploymentRecord, api: AirflowApi, *, is_up: bool) -> list[Finding]:
    """Check Airflow's processes, DAG files and workers on this computer."""
    running = {component.name for component in running_components(record)}
    if not running:
        return [note("deployment", f"down ({home.path})", "start it with `motley up`")]
    missing = [name for name in COMPONENTS if name not in running]
    health = api.health()
    sick = [name for name, state in health.items() if state != "healthy"]
    if missing or not is_up:
        what = f"not running: {', '.join(missing)}" if missing else f"not healthy: {', '.join(sick)}"
        logs = home.airflow_dir / "logs" / "components"
        return [bad("deployment", f"{record.url}, {what}", f"run `motley up` (it keeps stage processes); logs: {logs}")]
    findings = [good("deployment", f"{record.url}, {', '.join(COMPONENTS)} healthy")]
    faults = api.import_errors()
    findings += [
        bad("DAG file", f"{fault.get('filename')}: {_last_line(fault)}", "mend the file, or reinstall Motley")
        for fault in faults
    ]
    findings += [
        bad(
            f"worker {worker.machine}",
            "its process is gone",
            f"run `motley up`; its log is {worker_log(home, worker.machine)}",
        )
        for worker in record.workers
        if not is_running(worker)
    ]
    return findings


def check_cluster(cluster: Cluster, record: DeploymentRecord | None, api: AirflowApi | None) -> list[Finding]:
    """Check that every machine of a cluster file has a living worker that says the same of it."""
    if record is None or api is None:
        return [bad("cluster", "the deployment is down", "start it with `motley up --cluster FILE`")]
    if not record.has_workers:
        if len(cluster.machines) == 1:
            return [good("cluster", f"{cluster.name}: one machine, served by the deployment itself")]
        return [
            bad(
                "cluster",
                f"{cluster.name} has {len(cluster.machines)} machines, the deployment has no workers",
                "`motley down`, then `motley up --cluster FILE`",
            )
        ]
    reported = {worker["worker_name"]: worker for worker in api.workers()}
    findings = []
    for machine in cluster.machines:
        name, worker = f"machine {machine.name}", reported.get(machine.name)
        start = f"start it with `motley worker --machine {machine.name} --cluster FILE`"
        if worker is None:
            findings.append(bad(name, "no worker of that name has ever reported itself", start))
            continue
        age = seconds_since(worker["last_heartbeat"])
        info = worker.get("sysinfo") or {}
        if worker["state"] in GONE_STATES or (age is not None and age > SILENT_S):
            heard = "never heard of" if age is None else f"last heard of {age:.0f} s ago"
            findings.append(bad(name, f"worker is {worker['state']}, {heard}", start))
        elif machine.queue_name not in (worker["queues"] or ()):
            findings.append(bad(name, f"worker serves {worker['queues']}, not {machine.queue_name}", "restart it"))
        elif (said := (info.get("region"), info.get("gpu"), info.get("gpu_count"))) != (
            machine.region, machine.gpu, machine.count,
        ):  # fmt: skip
            findings.append(bad(name, f"worker was started for {said}", "restart it with this cluster file"))
        elif "maintenance" in worker["state"]:
            findings.append(note(name, f"worker is in {worker['state']}", "end it in the UI: Admin, Edge Worker"))
        else:
            findings.append(good(name, f"worker {worker['state']}, queue {machine.queue_name}, {machine.count} x "
                                       f"{machine.gpu} in {machine.region}"))  # fmt: skip
    return findings


def _attempt(check: str, look: Callable[[], str], remedy: str) -> Finding:
    try:
        return good(check, look())
    except CommandError as error:
        return bad(check, str(error), remedy)


def _airflow_facts(environment: Mapping[str, str]) -> str:
    python, version = airflow_python(environment)
    return f"{version} at {python}"


def _has_edge() -> bool:
    try:
        return importlib.util.find_spec("airflow.providers.edge3") is not None
    except ModuleNotFoundError:
        return False


def _check_engines(record: DeploymentRecord | None, environment: Mapping[str, str]) -> Finding:
    try:
        python = engines_python(environment, record.engines_python if record else None)
    except CommandError as error:
        return bad("engines", str(error), "run `make env`")
    script = (
        "import importlib.util as u, sys\n"
        "print(' '.join(n for n in sys.argv[1:] if u.find_spec(n) is None))"
    )  # fmt: skip
    done = subprocess.run(
        [python, "-c", script, *ENGINE_LIBRARIES], capture_output=True, text=True, timeout=60, check=False
    )
    if missing := done.stdout.split():
        return bad("engines", f"{python} lacks {', '.join(missing)}", "run `make env`")
    return good("engines", python)


def _home_facts(home: MotleyHome) -> str:
    check_home(home)
    free = shutil.disk_usage(home.path).free
    if free < 2 * MIN_FREE_BYTES:
        raise CommandError(f"{home.path} has only {free / 1e9:.1f} GB left")
    return f"{home.path}, {free / 1e9:.0f} GB free"


def _record_facts(home: MotleyHome) -> str:
    record = read_record(home.deployment_file)
    if record is None:
        return "none yet"
    database = "SQLite" if record.database_url is None else record.database_url.partition(":")[0]
    return f"{database}, {len(record.workers)} worker(s) on this computer"


def _settings(environment: Mapping[str, str]) -> Finding:
    try:
        file, settings = settings_file(environment), read_settings(environment)
    except ContractError as error:
        return bad("settings", str(error), "correct the file; alerts and redaction wait for it")
    named = [item.call for item in settings.alerts.notifiers]
    if settings.redaction is not None:
        named.append(settings.redaction.call)
    if missing := [call for call in named if not _is_there(call.rpartition(".")[0])]:
        return bad("settings", f"{file} names {', '.join(missing)}, which are in no module here", "install the package")
    told = f"alerts go to {len(settings.alerts.notifiers)} notifier(s)" if file else "none: alerts are logged only"
    return good("settings", f"{file}, {told}" if file else told)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _entry_findings(home: MotleyHome) -> Iterator[Finding]:
    for file in list_run_entries(home.runs_dir):
        try:
            read_run_entry(file)
        except ContractError as error:
            remedy = f"remove {file} and resume the run by its store: `motley resume ROOT/{file.stem}`"
            yield bad(f"run {file.stem}", str(error), remedy)


def _last_line(fault: Mapping[str, object]) -> str:
    return (str(fault.get("stack_trace") or "").strip().splitlines() or ["?"])[-1]
