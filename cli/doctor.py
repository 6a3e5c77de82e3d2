"""`motley doctor`: what is wrong with an installation, a cluster or a run, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from cli.deployment import HomeOption, JsonOption, home_of
from cli.deployment_api import AirflowApi
from cli.deployment_record import DeploymentRecord, read_record
from cli.deployment_start import is_up
from cli.doctor_checks import Finding, Verdict, check_cluster, check_deployment, check_installation
from cli.doctor_run import check_run
from cli.documents import read_cluster
from cli.errors import CommandError
from cli.output import Output
from cli.run_lookup import RUN_HELP, find_run

app = typer.Typer()

_MARKS = {Verdict.GOOD: ("ok  ", "green"), Verdict.NOTE: ("note", "yellow"), Verdict.BAD: ("BAD ", "red")}


@app.command()
def doctor(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help=RUN_HELP)] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", "-c", help="Cluster file whose machines should have workers.")
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Check this installation and deployment, a cluster's workers and a run; exit code 1 when something is bad."""
    output, place = Output(is_json=json), home_of(home)
    record = _record(place.deployment_file)
    findings = check_installation(place, record, os.environ)
    is_running = record is not None and is_up(record)
    if record is not None:
        with AirflowApi(record.url) as api:
            findings += check_deployment(place, record, api, is_up=is_running)
            if cluster is not None:
                findings += check_cluster(read_cluster(cluster), record, api if is_running else None)
            if run is not None:
                findings += check_run(find_run(run, place), record, api if is_running else None, cluster)
    else:
        if cluster is not None:
            findings += check_cluster(read_cluster(cluster), None, None)
        if run is not None:
            find_run(run, place)  # nothing more is known of a run while there is no deployment
    bad = [finding for finding in findings if finding.verdict is Verdict.BAD]
    if json:
        output.result({"is_good": not bad, "findings": [_document(finding) for finding in findings]}, "")
    else:
        _print(output, findings)
    if bad:
        raise CommandError(f"{len(bad)} of {len(findings)} checks are bad; what to do stands beside each.")


def _record(file: Path) -> DeploymentRecord | None:
    """Return the deployment's record; an unreadable one is reported by the installation's checks."""
    try:
        return read_record(file)
    except CommandError:
        return None


def _document(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "verdict": finding.verdict.value,
        "found": finding.found,
        "remedy": finding.remedy,
    }


def _print(output: Output, findings: Sequence[Finding]) -> None:
    for finding in findings:
        mark, style = _MARKS[finding.verdict]
        line = Text(f"{mark} {finding.check}: {finding.found}", style=style if finding.remedy else "")
        output.console.print(line)
        if finding.remedy:
            output.console.print(f"       -> {finding.remedy}", markup=False)
