"""Child process that makes a run's first model: `python -m stages.models --folder F`.

Reads `spec.json` in the folder (a `ModelSpecification`), writes the directory `model` and `facts.json` there, or
`failure.json`; `progress.json` says where a warm-up stands. A process of its own, so that a stage needs no torch and
can end it at a deadline.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field

from plans.spec.llm import LlmShape
from stages.data.spec import DataSpec, TemplateSpec
from stages.failures import record_failure
from stages.models.materialise import materialise
from stages.models.request import MaterialiseRequest
from stages.spec.section import Section
from stages.spec.source import Source

if TYPE_CHECKING:
    from stages.models.warm_up import WarmUpProgress

SPEC_NAME: Final = "spec.json"
MODEL_NAME: Final = "model"
FACTS_NAME: Final = "facts.json"
FAILURE_NAME: Final = "failure.json"
PROGRESS_NAME: Final = "progress.json"


class ModelSpecification(Section):
    """Everything that decides the first model."""

    source: Source
    shape: LlmShape
    seed: int = Field(default=0, ge=0)
    threads: int = Field(default=1, ge=1)
    """Torch threads; they may change the last bits of a warm-up, nothing else."""
    data: DataSpec
    """Dataset of the job, for a warm-up."""
    template: TemplateSpec = TemplateSpec()
    """Template of the job, for a warm-up."""


def build(folder: Path) -> None:
    """Write the model of the folder's specification.

    Raises:
        SpecFaultsError: See `materialise`.
        DataError: See `materialise`.
    """
    spec = ModelSpecification.model_validate_json((folder / SPEC_NAME).read_bytes())
    _set_threads(spec.threads)

    def report(progress: WarmUpProgress) -> None:
        temporary = folder / f".{PROGRESS_NAME}"
        temporary.write_text(json.dumps(asdict(progress)), encoding="utf-8")
        temporary.replace(folder / PROGRESS_NAME)

    from stages.models.dataset_rows import dataset_warm_up_rows

    request = MaterialiseRequest(
        shape=spec.shape,
        seed=spec.seed,
        warm_up_rows=lambda tokenizer: dataset_warm_up_rows(spec.data, spec.template, tokenizer),
        report=report,
    )
    model = materialise(spec.source, request, folder / MODEL_NAME)
    facts = {"weights_hash": model.weights_hash, "shape": model.shape.model_dump(mode="json"), **model.facts}
    (folder / FACTS_NAME).write_text(json.dumps(facts), encoding="utf-8")


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def main() -> int:
    """Build, or record why it failed."""
    parser = argparse.ArgumentParser(prog="python -m stages.models")
    parser.add_argument("--folder", type=Path, required=True)
    folder: Path = parser.parse_args().folder
    try:
        build(folder)
    except Exception as error:  # noqa: BLE001 - the process boundary: the parent raises it again
        record_failure(folder / FAILURE_NAME, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
