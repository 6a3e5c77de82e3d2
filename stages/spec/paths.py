"""Local paths of job and cluster files: relative ones are relative to the file that names them.

Stages run in folders of their own, so a run keeps absolute paths only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel

from plans.spec.job import JobModels, ModelSpec
from stages.data.file_source import JSON_LINES_SUFFIXES, PARQUET_SUFFIX
from stages.spec.source import GgufSource, HuggingFaceSource

if TYPE_CHECKING:
    from stages.spec.job import TrainingJob

DocumentT = TypeVar("DocumentT", bound=BaseModel)

_HUB_DATASETS = "hf:"
_MARKS = ("./", "../", "~")
"""What tells a local folder from the id of a hub."""


def with_absolute_paths(job: TrainingJob, base: Path) -> TrainingJob:
    """Return the job with every local path absolute.

    Args:
        job: As written.
        base: Folder of its file, absolute.
    """
    data, source = job.data, job.source
    data = data.model_copy(
        update={
            "source": _dataset(data.source, base),
            "held_out_source": None if data.held_out_source is None else _dataset(data.held_out_source, base),
        }
    )
    if isinstance(source, HuggingFaceSource | GgufSource) and source.path is not None:
        is_hub_id = isinstance(source, HuggingFaceSource) and not source.path.startswith(_MARKS)
        source = source if is_hub_id else source.model_copy(update={"path": absolute(source.path, base)})
    models = _models(job.planner.models, base)
    planner = job.planner if models == job.planner.models else _with(job.planner, models=models)
    storage = job.storage
    if storage.root is not None:
        storage = storage.model_copy(update={"root": absolute(storage.root, base)})
    return _with(job, data=data, planner=planner, source=source, storage=storage)


def _with(document: DocumentT, **changes: object) -> DocumentT:
    """Return a document with other fields, made anew: a copy would take cached properties along."""
    fields = {name: getattr(document, name) for name in type(document).model_fields}
    return type(document)(**{**fields, **changes})


def _models(models: JobModels, base: Path) -> JobModels:
    """Return the models with absolute folders of those that have weights of their own."""
    found = {name: getattr(models, name) for name in type(models).model_fields}
    changed = {
        name: model.model_copy(update={"path": absolute(model.path, base)})
        for name, model in found.items()
        if isinstance(model, ModelSpec) and model.path is not None and model.path.startswith(_MARKS)
    }
    return models.model_copy(update=changed)


def absolute_roots(roots: Mapping[str, str], base: Path) -> dict[str, str]:
    """Return the stores of a cluster file, by region, with local folders absolute."""
    return {region: absolute(root, base) for region, root in roots.items()}


def absolute(path: str, base: Path) -> str:
    """Return a path as an absolute one; URLs and absolute paths are left as they are."""
    if "://" in path or path.startswith("/"):
        return path
    return str(base / Path(path).expanduser())


def _dataset(source: str, base: Path) -> str:
    rest = source.removeprefix(_HUB_DATASETS)
    if rest != source:
        return f"{_HUB_DATASETS}{absolute(rest, base)}" if rest.startswith(_MARKS) else source
    return absolute(source, base) if source.endswith((*JSON_LINES_SUFFIXES, PARQUET_SUFFIX)) else source
