"""Every object key of a region's root as a function; the inverse is `storage.parsed_keys`.

Keys are relative to the store's root, use ``/`` and hold no empty, ``.`` or ``..`` segment. An *artefact* is a
folder with one ``manifest.json`` and, per attempt, one folder of data objects::

    <run>/run.json
    <run>/profiles/<n>.json                 or <run>/profiles/<n>/<queue>.json
    <run>/plans/<n>.json
    <run>/iterations/<k>/record.json
    <run>/iterations/<k>/quality.json
    <run>/iterations/<k>/gangs/<task>/<epoch>.json and .../<epoch>/<machine>.json
    <run>/iterations/<k>/[eval/]<family>/shard-<s>/manifest.json
    <run>/iterations/<k>/[eval/]<family>/shard-<s>/<attempt>/rows.parquet
    <run>/policies/head.json
    <run>/policies/<v>/manifest.json        and <run>/policies/<v>/<attempt>/<file>
    <run>/trainer/index.json
    <run>/trainer/<v>/manifest.json         and <run>/trainer/<v>/<attempt>/<file>
    <run>/leases/<holder>.json
    <run>/readers/<machine>.json
    <run>/retention.json
    <run>/removed.json
    <run>/alerts/<matter>.json
    <run>/metrics/manifest.json             and <run>/metrics/<attempt>/metrics.parquet
    <run>/superseded/<n>/<key of a manifest or record>
    <run>/rescored/<name>/<split>/run=<run>/scores.json and .../iteration=<k>/rescored.parquet

The run's name is the first segment of every key, so a fresh run can never pick up another run's objects.
For evaluations ``<k>`` is the policy version that was evaluated (version k is the policy that iteration k starts
from), so the initial policy has a place at ``iterations/0/eval`` and the final one at ``iterations/<N>/eval``.
"""

from __future__ import annotations

from enum import StrEnum

from storage.errors import InvalidNameError
from storage.names import NUMBER, check_name, escape_name

MANIFEST_NAME = "manifest.json"
"""File name of the one object that makes an artefact visible."""

ROWS_NAME = "rows.parquet"
"""File name of the data object of a rollout or column-family shard."""

METRICS_NAME = "metrics.parquet"
"""File name of the data object of the exported metrics."""

RESCORED_NAME = "rescored.parquet"
"""File name of an iteration's scores by other rewards."""

SCORES_NAME = "scores.json"
"""File name of the document that says which rewards gave the scores beside it."""


class Split(StrEnum):
    """What a rollout was made for."""

    TRAIN = "train"
    """Trained on."""

    EVAL = "eval"
    """Held-out measurement; never trained on."""


def _number(value: int, what: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        message = f"{what} {value!r} cannot be part of an object key: a whole number >= 0 is needed"
        raise InvalidNameError(message)
    return str(value)


def run_folder(run: str) -> str:
    """Folder of a run."""
    return check_name(run, "run name")


def run_record(run: str) -> str:
    """Key of the run record."""
    return f"{run_folder(run)}/run.json"


def profile(run: str, number: int, queue: str | None = None) -> str:
    """Key of profile ``number``: the whole cluster's, or one queue's own measurement (one writer per object)."""
    base = f"{run_folder(run)}/profiles/{_number(number, 'profile number')}"
    return f"{base}.json" if queue is None else f"{base}/{check_name(queue, 'queue')}.json"


def plan(run: str, number: int) -> str:
    """Key of plan ``number``."""
    return f"{run_folder(run)}/plans/{_number(number, 'plan number')}.json"


def iteration_folder(run: str, iteration: int) -> str:
    """Folder of an iteration: its record, rollouts and column families."""
    return f"{run_folder(run)}/iterations/{_number(iteration, 'iteration')}"


def iteration_record(run: str, iteration: int) -> str:
    """Key of the record of an iteration."""
    return f"{iteration_folder(run, iteration)}/record.json"


def iteration_plan(run: str, iteration: int) -> str:
    """Key of the document that says which plan an iteration uses."""
    return f"{iteration_folder(run, iteration)}/plan.json"


def quality_report(run: str, iteration: int) -> str:
    """Key of the quality report of an iteration."""
    return f"{iteration_folder(run, iteration)}/quality.json"


def gangs_folder(run: str, iteration: int) -> str:
    """Folder of what the machines say that train an iteration together."""
    return f"{iteration_folder(run, iteration)}/gangs"


def gang_epoch(run: str, iteration: int, task: str, epoch: int) -> str:
    """Key that says that an epoch of a task's gang has begun."""
    return f"{gangs_folder(run, iteration)}/{check_name(task, 'task')}/{_number(epoch, 'epoch')}.json"


def gang_member(run: str, iteration: int, task: str, epoch: int, machine: str) -> str:
    """Key of what a member of a gang says of itself."""
    return f"{gang_epoch(run, iteration, task, epoch).removesuffix('.json')}/{escape_name(machine)}.json"


def shard_folder(run: str, iteration: int, family: str, shard: int, split: Split | str = Split.TRAIN) -> str:
    """Folder (artefact) of one shard of the rollouts or of a column family."""
    base = iteration_folder(run, iteration)
    part = "eval/" if Split(split) is Split.EVAL else ""
    index = int(_number(shard, "shard"))
    return f"{base}/{part}{check_name(family, 'family')}/shard-{index:05d}"


def policy_head(run: str) -> str:
    """Key of the document that names the authoritative policy version."""
    return f"{run_folder(run)}/policies/head.json"


def policies_folder(run: str) -> str:
    """Folder of all policy versions."""
    return f"{run_folder(run)}/policies"


def policy_folder(run: str, version: int) -> str:
    """Folder (artefact) of one policy version."""
    return f"{policies_folder(run)}/{_number(version, 'policy version')}"


def checkpoints_folder(run: str) -> str:
    """Folder of all resume points."""
    return f"{run_folder(run)}/trainer"


def checkpoint_index(run: str) -> str:
    """Key of the index of committed resume points."""
    return f"{checkpoints_folder(run)}/index.json"


def checkpoint_folder(run: str, version: int) -> str:
    """Folder (artefact) of one resume point."""
    return f"{checkpoints_folder(run)}/{_number(version, 'checkpoint version')}"


def critics_folder(run: str) -> str:
    """Folder of all critic versions."""
    return f"{run_folder(run)}/critics"


def critic_folder(run: str, version: int) -> str:
    """Folder (artefact) of one critic version: weights and resume point together (PPO)."""
    return f"{critics_folder(run)}/{_number(version, 'critic version')}"


def leases_folder(run: str) -> str:
    """Folder of all readers' leases."""
    return f"{run_folder(run)}/leases"


def lease(run: str, holder: str) -> str:
    """Key of one reader's lease."""
    return f"{leases_folder(run)}/{check_name(holder, 'lease holder')}.json"


def reader_turn(run: str, machine: str) -> str:
    """Key of what a machine says of its reading of new weights."""
    return f"{run_folder(run)}/readers/{escape_name(machine)}.json"


def retention_ledger(run: str) -> str:
    """Key of the document that names versions about to be deleted."""
    return f"{run_folder(run)}/retention.json"


def removed_rollouts(run: str) -> str:
    """Key of the document that says which iterations' rollouts were removed on purpose."""
    return f"{run_folder(run)}/removed.json"


def alerts_folder(run: str) -> str:
    """Folder of what people were told of a run."""
    return f"{run_folder(run)}/alerts"


def alert(run: str, matter: str) -> str:
    """Key of the last alert about one matter."""
    return f"{alerts_folder(run)}/{check_name(matter, 'matter of an alert')}.json"


def metrics_folder(run: str) -> str:
    """Folder (artefact) of the exported metrics."""
    return f"{run_folder(run)}/metrics"


def superseded_folder(run: str) -> str:
    """Folder of everything that rewinds have set aside."""
    return f"{run_folder(run)}/superseded"


def superseded(run: str, rewind: int, key: str) -> str:
    """Key of a manifest or record that the run's n-th rewind has set aside.

    Args:
        run: Run name.
        rewind: Number of the rewind, from 1.
        key: Its key before, without the run's folder.
    """
    return f"{superseded_folder(run)}/{_number(rewind, 'rewind')}/{key}"


def rescored_folder(run: str, name: str, split: Split | str = Split.TRAIN) -> str:
    """Folder of scores that other rewards gave to a run's completions, a hive-partitioned dataset."""
    return f"{run_folder(run)}/rescored/{check_name(name, 'name of scores')}/{Split(split).value}"


def partition_folder(run: str, iteration: int | None = None) -> str:
    """Folder of a run in a hive-partitioned dataset, or of one of its iterations."""
    folder = f"run={run_folder(run)}"
    return folder if iteration is None else f"{folder}/iteration={_number(iteration, 'iteration')}"


def manifest_key(folder: str) -> str:
    """Key of the manifest of an artefact."""
    return f"{folder}/{MANIFEST_NAME}"


def data_key(folder: str, attempt: str, name: str) -> str:
    """Key of a data object of one attempt at an artefact.

    Args:
        folder: The artefact's folder.
        attempt: Attempt token, unique per try, so no two tries ever write the same object.
        name: File name; may hold ``/`` for sub-folders, each segment a valid name.
    """
    segments = "/".join(check_name(segment, "file name") for segment in name.split("/"))
    return f"{folder}/{check_attempt(attempt)}/{segments}"


def check_attempt(attempt: str) -> str:
    """Return ``attempt`` unchanged if it may name an attempt folder (it must not be a plain number)."""
    if NUMBER.match(check_name(attempt, "attempt")) or attempt.endswith(".json"):
        message = f"attempt {attempt!r} is refused: a plain number or *.json could be taken for another object"
        raise InvalidNameError(message)
    return attempt
