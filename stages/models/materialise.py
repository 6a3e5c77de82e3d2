"""From a job's `source` to a model directory in Hugging Face format: the registry of sources and the one entry."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from plans.spec.llm import LlmShape
from stages.engines.weight_files import weight_files
from stages.models.request import MaterialiseRequest
from stages.models.shape import check_shape
from stages.spec.source import Source
from storage.weights_hash import weights_hash

_WRITERS: Final[Mapping[str, str]] = {
    "hf": "stages.models.huggingface_source:write_huggingface_model",
    "gguf": "stages.models.gguf_source:write_gguf_model",
    "init": "stages.models.init_source:write_init_model",
}
"""Writer by type of source; imported on use, since they load torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterialisedModel:
    """A model directory and what is known of it."""

    directory: Path
    shape: LlmShape
    weights_hash: str
    """As `storage.policies` computes it."""
    facts: Mapping[str, Any]
    """What the source's writer reports, e.g. `warm_up_score`."""


def materialise(source: Source, request: MaterialiseRequest, out_dir: Path) -> MaterialisedModel:
    """Write a source's model; `out_dir` appears at once, when it is complete.

    Args:
        source: Section `source` of a job.
        request: Shape, seed, rows of a warm-up.
        out_dir: Must not exist.

    Raises:
        SpecFaultsError: The model is not of the job's shape, or a warm-up failed.
        DataError: The source can't be read; says what to do.
        FileExistsError: `out_dir` exists.
    """
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists already: a model is written into a fresh directory")
    staged = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        facts = _writer(source.type)(source, request, staged)
        shape = check_shape(staged, request.shape, "actor")
        digest = weights_hash({path.name: path for path in weight_files(staged)})
        staged.rename(out_dir)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return MaterialisedModel(directory=out_dir, shape=shape, weights_hash=digest, facts=json.loads(json.dumps(facts)))


def _writer(kind: str) -> Callable[[Source, MaterialiseRequest, Path], dict[str, Any]]:
    module_name, _, name = _WRITERS[kind].partition(":")
    writer: Callable[[Source, MaterialiseRequest, Path], dict[str, Any]] = getattr(
        importlib.import_module(module_name), name
    )
    return writer
