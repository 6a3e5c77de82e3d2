"""Child processes for models with a scalar head (critic, reward model): a stage itself never loads torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.errors import DeadlineError
from stages.failures import raise_recorded_failure


def run_heads(folder: Path, spec: Mapping[str, Any], timeout_s: float, what: str) -> dict[str, Any]:
    """Run `stages.models.heads` in a folder of its own and return the facts that it leaves.

    Args:
        folder: Made anew; holds what the child writes.
        spec: What is asked for; see `stages.models.heads`.
        timeout_s: Longest run, seconds.
        what: Name of the work, for messages.

    Raises:
        SpecFaultsError: the model is of another shape, or has missing or unknown tensors.
        DataError: files that can't be read.
        DeadlineError: it took too long.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    command = [sys.executable, "-m", "stages.models.heads", "--folder", str(folder)]
    try:
        done = subprocess.run(command, stdout=sys.stderr, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"{what} did not end within {timeout_s:.0f} s.") from error
    if done.returncode:
        raise_recorded_failure(folder / "failure.json", f"{what} (exit code {done.returncode})")
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return facts


def scalar_head_faults(
    source: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]], timeout_s: float
) -> list[str]:
    """Return every reason why a critic or reward model can't be used, one sentence each.

    Args:
        source: Section `source` of the job, which gives the actor's tokenizer.
        models: Path and shape by role (`critic`, `reward`).
        timeout_s: Longest run, seconds.
    """
    with tempfile.TemporaryDirectory(prefix="motley-heads-") as parent:
        facts = run_heads(Path(parent) / "heads", {"source": source, "check": models}, timeout_s, "checking the models")
    return list(facts["faults"])
