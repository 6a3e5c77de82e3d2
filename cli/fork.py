"""`motley fork RUN --from VERSION --name NEW --set SECTION.FIELD=VALUE`: go on from a version with other settings.

A fork is a run of its own, with its own data: it starts with copies of the version, of its resume point and of version
0 (the reference policy), and counts its iterations on from there. The run that it comes from is not touched.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cli.deployment import HomeOption, JsonOption, home_of
from cli.deployment_api import AirflowApi
from cli.deployment_start import bring_up
from cli.errors import InputError
from cli.output import Output
from cli.run_control import RunArgument
from cli.run_lookup import FoundRun, find_run
from cli.run_register import check_served, register, wait_for_dag
from stages.home import dag_id_of
from stages.run_entry import run_name_fault
from stages.runs import ResolvedRun, create_run, demand_entry, load_run
from stages.spec.job import TrainingJob, training_job_from_document
from storage.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from storage.policies import head_version, publish_policy, resolve_policy
from storage.policy_fetch import fetch_policy
from storage.store import Store, open_store

app = typer.Typer()

OWN_FACTS = ("weights_hash", "delta", "files", "adapter")
"""Facts of a policy's manifest that its publisher finds anew."""

FIXED_SECTIONS = ("source", "data", "template")
"""Sections that a fork shares with the run that it comes from: they decide what the copied version and its data are."""


@app.command()
def fork(
    run: RunArgument,
    version: Annotated[int, typer.Option("--from", min=0, help="Policy version to go on from.")],
    name: Annotated[str, typer.Option("--name", help="Name of the new run.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Changed setting, e.g. optimizer.learning_rate=1e-5."),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option("--iterations", "-n", min=1, help="Iterations in all, counted from 0 as in RUN.")
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Start a run that goes on from a policy version of another one, with changed settings."""
    output, place = Output(is_json=json), home_of(home)
    found = find_run(run, place)
    if place.run_entry_file(name).exists():
        raise InputError(f"There is a run {name!r} in {place.path} already; give another --name.")
    forked = forked_run(found, version, name, settings or [], iterations)
    entry = demand_entry(forked)
    deployment = bring_up(place, port=None, environment=os.environ, report=output.progress)
    check_served(deployment, entry)
    create_run(forked)
    copy_version(found.store, found.name, open_store(forked.home_root), forked, version)
    register(entry, place)
    with AirflowApi(deployment.url) as api:
        wait_for_dag(api, entry)
    output.result(
        {"run": name, "forked_from": dict(forked.forked_from or {}), "iterations": entry.iterations},
        f"Run {name} goes on from policy version {version} of {found.name} by itself: "
        f"{deployment.url}/dags/{dag_id_of(name)}; follow it with `motley resume {name}`.",
    )


def forked_run(
    found: FoundRun, version: int, name: str, settings: Sequence[str], iterations: int | None
) -> ResolvedRun:
    """Return the new run.

    Raises:
        InputError: no such version, a bad name, or settings that a fork can't change.
        SpecFaultsError: the changed job has faults.
    """
    parent = load_run(found.store.url, found.name)
    head = head_version(found.store, found.name)
    if head is None or version > head:
        raise InputError(
            f"Run {found.name} has no policy version {version} (its newest is {head}); fork from an earlier one."
        )
    if (fault := run_name_fault(name)) is not None:
        raise InputError(fault)
    if parent.job.ppo is not None:
        raise InputError(
            f"Run {found.name} is a PPO run; a fork does not copy critics yet, so start a new run with `motley run`, "
            "or go back with `motley rewind`."
        )
    document = parent.job.to_document()
    for setting in settings:
        _change(document, setting)
    document["iterations"] = iterations or document["iterations"]
    job = training_job_from_document(document, f"the job of {found.name} with the changed settings")
    _check_change(parent.job, job, found.name)
    if job.iterations <= version:
        raise InputError(
            f"A fork from version {version} makes iterations {version} and later, but it has {job.iterations} in all; "
            f"give --iterations {version + 1} or more."
        )
    return ResolvedRun(
        name=name,
        job=job,
        cluster=parent.cluster,
        roots=parent.roots,
        drained=parent.drained,
        first_iteration=version,
        forked_from={"run": found.name, "root": found.store.url, "version": version, "settings": list(settings)},
    )


def copy_version(source: Store, parent: str, target: Store, run: ResolvedRun, version: int) -> None:
    """Copy a version with its resume point, and version 0, into a new run; what is there already is left."""
    checkpoint = load_checkpoint(source, parent, version)
    if checkpoint.version != version:
        raise InputError(
            f"The resume point of version {version} of run {parent} is not kept any more (the newest usable one is "
            f"{checkpoint.version}); fork from a version that has one."
        )
    with tempfile.TemporaryDirectory(prefix="motley-fork-") as folder:
        _copy_checkpoint(source, target, run, checkpoint, Path(folder) / "trainer")
        for number in dict.fromkeys([0, version]):
            policy = resolve_policy(source, parent, number)
            local = fetch_policy([source], policy, Path(folder) / f"policy-{number}").local.folder
            publish_policy(
                target, run.name, number, _files(local), created_by="fork",
                metadata={n: value for n, value in policy.manifest.metadata.items() if n not in OWN_FACTS},
                is_head=number == version,
                adapter_base=None if policy.adapter is None else resolve_policy(target, run.name, 0),
            )  # fmt: skip


def _copy_checkpoint(source: Store, target: Store, run: ResolvedRun, found: Checkpoint, folder: Path) -> None:
    for part in found.manifest.parts:
        (folder / part.name).parent.mkdir(parents=True, exist_ok=True)
        source.download(part.path, folder / part.name)
    save_checkpoint(
        target, run.name, found.version, _files(folder), config_hash=run.job.fingerprint,
        dataset_fingerprint=found.dataset_fingerprint, data_position=found.data_position, rng_files=found.rng_files,
        created_by="fork", metadata=_without_waiting(found),
    )  # fmt: skip


def _without_waiting(found: Checkpoint) -> dict[str, Any]:
    """Return the resume point's facts; rollouts that wait in the buffer are the other run's, a fork withholds them."""
    own = ("config_hash", "dataset_fingerprint", "data_position", "rng_files")
    facts = {name: value for name, value in found.manifest.metadata.items() if name not in own}
    buffer = facts.get("buffer")
    if not isinstance(buffer, dict):
        return facts
    withheld = int(buffer["num_withheld"]) + len(buffer["groups"])
    return {**facts, "buffer": {**buffer, "groups": [], "num_withheld": withheld}}


def _files(folder: Path) -> dict[str, bytes | Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _change(document: dict[str, Any], setting: str) -> None:
    """Set one field of a job document."""
    path, equals, text = setting.partition("=")
    *sections, field = path.split(".")
    place: Any = document
    for section in sections:
        place = place.get(section) if isinstance(place, dict) else None
    if not equals or not isinstance(place, dict) or field not in place:
        raise InputError(
            f"--set {setting} names no field of the job; write SECTION.FIELD=VALUE with a field that the job has, e.g. "
            "optimizer.learning_rate=1e-5."
        )
    place[field] = _value(setting, text, is_number=isinstance(place[field], float))


def _value(setting: str, text: str, *, is_number: bool) -> Any:  # noqa: ANN401 - any type of a job document
    """Return the value of a setting; what it may be is checked with the whole job."""
    try:
        value = yaml.safe_load(text)
        # YAML 1.1 reads 1e-5 (without a point) as text.
        value = float(text) if isinstance(value, str) and is_number else value
        json.dumps(value, allow_nan=False)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        what = " ".join(str(error).split())
        raise InputError(f"--set {setting}: {text!r} is no value of a job file ({what}); write one.") from error
    return value


def _check_change(before: TrainingJob, after: TrainingJob, run: str) -> None:
    changed = [name for name in FIXED_SECTIONS if getattr(before, name) != getattr(after, name)]
    if before.planner.models != after.planner.models:
        changed.append("models")
    if before.engines.training.lora != after.engines.training.lora:
        changed.append("engines.training.lora")
    if changed:
        raise InputError(
            f"A fork of run {run} can't change {', '.join(changed)}: its first version and data come from that run; "
            "start a new run with `motley run` instead."
        )
