"""Child process for models with a scalar head: `python -m stages.models.heads --folder F`.

Reads `spec.json` in the folder: with `backbone` it writes the first critic into `critic`, with `check` it looks at the
job's critic and reward model before anything starts. Leaves `facts.json` (of a check: `faults`), or `failure.json`. A
process of its own, so that a stage needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from plans.spec.llm import LlmShape
from stages.failures import record_failure
from stages.models.scalar_heads import HeadRole, head_faults, write_first_critic
from stages.source_tokenizer import load_source_tokenizer
from stages.spec.source import Source


def build(folder: Path) -> None:
    """Do what the folder's specification asks for."""
    spec: dict[str, Any] = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    if "backbone" in spec:
        shape = LlmShape.model_validate(spec["shape"])
        facts = write_first_critic(Path(spec["backbone"]), shape, folder / "critic")
    else:
        facts = {"faults": check(spec)}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def check(spec: dict[str, Any]) -> list[str]:
    """Return the faults of the scalar-head models of a job."""
    source: Source = TypeAdapter(Source).validate_python(spec["source"])
    tokenizer = load_source_tokenizer(source)
    roles: tuple[HeadRole, ...] = ("critic", "reward")
    return [
        fault
        for role in roles
        if role in spec["check"]
        for fault in head_faults(
            Path(spec["check"][role]["path"]).expanduser(),
            role,
            LlmShape.model_validate(spec["check"][role]["shape"]),
            tokenizer,
        )
    ]


def main() -> int:
    """Build, or record why it failed."""
    parser = argparse.ArgumentParser(prog="python -m stages.models.heads")
    parser.add_argument("--folder", type=Path, required=True)
    folder: Path = parser.parse_args().folder
    try:
        build(folder)
    except Exception as error:  # noqa: BLE001 - the process boundary: the parent raises it again
        record_failure(folder / "failure.json", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
