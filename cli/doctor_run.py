"""Checks of one run: its data, what Airflow thinks of it, whether it moves, and who would do its next task."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cli.deployment_api import AirflowApi
from cli.deployment_record import DeploymentRecord
from cli.deployment_workers import missing_queues
from cli.doctor_checks import Finding, bad, good, note
from cli.documents import read_cluster
from cli.follow import run_iteration
from cli.run_lookup import FoundRun
from stages.home import dag_id_of
from stages.run_entry import RunEntry
from stages.stall import last_word, stall_limit_s, usual_s, who_waits_now
from storage.alerts import list_alerts
from storage.errors import StorageError
from storage.iterations import find_records
from storage.policies import head_version, resolve_policy
from storage.runs import IterationRecord, RunRecord, load_run

RECENT_ALERTS_S = 86_400.0
"""Age of an alert, seconds, up to which it is shown."""


def check_run(found: FoundRun, record: DeploymentRecord, api: AirflowApi | None, cluster: Path | None) -> list[Finding]:
    """Check a run; without an API (the deployment is down) its data only."""
    try:
        run = load_run(found.store, found.name)
        head = head_version(found.store, found.name)
        if head is not None:
            resolve_policy(found.store, found.name, head)
        records = find_records(found.store, found.name)
    except StorageError as error:
        return [bad(f"run {found.name}", str(error), f"run `motley verify {found.name}`")]
    total = found.entry.iterations if found.entry else run.num_iterations
    name = f"run {found.name}"
    findings = [good(name, f"policy version {'none yet' if head is None else head} of {total}, {found.store.url}")]
    findings += [*_alarms(name, records), *_alerts(name, found)]
    if cluster is not None:
        findings += _same_cluster(name, run, cluster)
    if found.entry is None or api is None:
        return findings
    return [*findings, *_airflow(found, found.entry, head, records, record, api)]


def _alarms(name: str, records: list[IterationRecord]) -> list[Finding]:
    return [
        note(name, f"iteration {latest.iteration} raised an alarm: {alarm}", "look at `motley rollouts stats`")
        for latest in records[-1:]
        for alarm in latest.alarms
    ]


def _alerts(name: str, found: FoundRun) -> list[Finding]:
    """Return the alerts of the last day that no alarm of the newest record repeats, and what no notifier took."""
    now = datetime.now(UTC)
    recent = [a for a in list_alerts(found.store, found.name) if (now - a.raised_at).total_seconds() < RECENT_ALERTS_S]
    findings = [
        note(name, f"{alert.raised_at:%Y-%m-%d %H:%M} UTC, {alert.kind}: {alert.sentence}")
        for alert in recent
        if not alert.is_alarm
    ]
    faults = dict.fromkeys(fault for alert in recent for fault in alert.faults)
    return findings + [
        bad(name, f"an alert was not delivered: {fault}", "correct alerts.notifiers in the settings")
        for fault in faults
    ]


def _same_cluster(name: str, run: RunRecord, file: Path) -> list[Finding]:
    given = read_cluster(file).model_dump(mode="json")
    if given == run.cluster:
        return [good(name, f"its cluster is that of {file}")]
    return [
        bad(
            name,
            f"{file} differs from the cluster that the run was started with",
            "the run keeps its own; add machines with `motley add-machines`, take some out with `motley drain`",
        )
    ]


def _airflow(
    found: FoundRun,
    entry: RunEntry,
    version: int | None,
    records: list[IterationRecord],
    record: DeploymentRecord,
    api: AirflowApi,
) -> list[Finding]:
    name, head = f"run {found.name}", version or 0
    dag = api.dag(dag_id_of(entry.run))
    if dag is None:
        return [bad(name, "Airflow has no DAG of it", f"`motley resume {entry.run}` registers it")]
    runs = api.dag_runs(dag_id_of(entry.run))
    failed = sorted(run_iteration(item) for item in runs if item["state"] == "failed")
    active = [item for item in runs if item["state"] in ("running", "queued")]
    if head >= entry.iterations and not active and not failed:
        return [good(name, "finished")]
    findings = _standstill(name, entry, dag, failed, active) or [_movement(found, entry, version, active, records)]
    findings += _queues(name, entry, record, api)
    ahead = [k for item in runs if item["state"] == "success" and (k := run_iteration(item)) >= head]
    if ahead:
        findings.append(
            bad(
                name,
                f"Airflow has iteration(s) {ahead} as done, but the newest policy version is {head}",
                f"`motley resume {entry.run}` runs them again",
            )
        )
    return findings


def _standstill(
    name: str, entry: RunEntry, dag: dict[str, Any], failed: list[int], active: list[dict[str, Any]]
) -> list[Finding]:
    """Return why Airflow does not go on with a run; nothing where it does."""
    resume = f"after the cause is removed, `motley resume {entry.run}`"
    if failed:
        return [bad(name, f"iteration(s) {', '.join(map(str, failed))} failed", resume)]
    if dag.get("is_paused"):
        return [note(name, "paused", f"`motley unpause {entry.run}`, or `motley resume {entry.run}` to follow it")]
    if not active and dag.get("next_dagrun_logical_date") is None:
        return [bad(name, "no iteration is at work and Airflow plans none (an error in the timetable?)", "`motley up`")]
    return []


def _movement(
    found: FoundRun,
    entry: RunEntry,
    version: int | None,
    active: list[dict[str, Any]],
    records: list[IterationRecord],
) -> Finding:
    """Return whether iterations end, and if none has for long, who waits for whom."""
    name, usual, last = f"run {found.name}", usual_s(records), last_word(records)
    silent_s = 0.0 if last is None else (datetime.now(UTC) - last).total_seconds()
    if usual is not None and silent_s > stall_limit_s(records, entry.stall_check_s):
        try:
            waits = who_waits_now(found.rows_store(), found.name, version)
        except StorageError as error:
            waits = f"who waits for whom can't be read ({error})"
        said = f"no iteration ended for {silent_s:.0f} s (usual: {usual:.0f} s): {waits}"
        return bad(name, said, _stalled(entry))
    at_work = ", ".join(str(run_iteration(item)) for item in active) or "none yet"
    return good(name, f"iteration(s) at work: {at_work}")


def _stalled(entry: RunEntry) -> str:
    return f"look at the task's log in the UI; `motley stop {entry.run}`, then `motley resume {entry.run}`"


def _queues(name: str, entry: RunEntry, record: DeploymentRecord, api: AirflowApi) -> list[Finding]:
    """Look for machines that work is waiting for and that nobody serves."""
    if not record.has_workers:
        return []
    served = [machine for machine in entry.machines if machine.name not in entry.drained]
    missing = missing_queues(api, [machine.queue for machine in served])
    waiting = {task["queue"] for task in api.queued_tasks(dag_id_of(entry.run))}
    findings = []
    for machine in served:
        if machine.queue in missing:
            what = "tasks wait for it" if machine.queue in waiting else "nothing waits for it yet"
            start = f"start it with `motley worker --machine {machine.name} --cluster FILE`"
            findings.append(
                bad(name, f"machine {machine.name} has no living worker; {what}",
                    f"{start}, or go on without it: `motley drain {entry.run} {machine.name} --now`")
            )  # fmt: skip
    return findings
