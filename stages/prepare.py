"""Stage prepare (iteration 0): policy version 0 with its resume point, on the machine that trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from pydantic import JsonValue

from plans.workflow import RlTask
from stages.context import StageContext, StageOutcome
from stages.critic_versions import make_first_critic, publish_critic_version
from stages.engines.canary import NUM_ROWS, canary_rows
from stages.failures import raise_recorded_failure
from stages.gang_layout import has_several_machines
from stages.policy_files import policy_at_home, policy_directory
from stages.prompts import open_prompts, prompt_cache
from stages.publish import publish_version
from stages.reward_model import WEIGHTS_KEY, reward_model_files
from stages.single_machine_plan import CPU
from stages.staleness.buffer import RolloutBuffer
from stages.weights_proof import canary_of
from storage.checkpoints import load_checkpoint
from storage.errors import CorruptObjectError, ObjectMissingError
from storage.layout import checkpoint_folder, critic_folder, manifest_key, policy_folder
from storage.policies import Policy, advance_head, head_version
from storage.weights_hash import weights_hash

SPEC_NAME: Final = "spec.json"
"""File names that `stages.models` reads and writes in its folder."""
FACTS_NAME: Final = "facts.json"
FAILURE_NAME: Final = "failure.json"
MODEL_NAME: Final = "model"


def run_stage(context: StageContext) -> StageOutcome:
    """Make version 0 if the run has none; later iterations find it done."""
    run, home = context.run.name, context.home
    if context.iteration > 0:
        policy_at_home(context, 0)
        return StageOutcome(reused=True, artefacts=(manifest_key(policy_folder(run, 0)),))
    with context.machine_to_itself():
        is_reused = head_version(home, run) is not None
        if not is_reused:
            _first_versions(context)
        policy = policy_at_home(context, 0)
    keys = (manifest_key(policy_folder(run, 0)), manifest_key(checkpoint_folder(run, 0)))
    metrics: dict[str, JsonValue] = {
        "policy_version": 0,
        "weights_hash": policy.weights_hash,
        "source": policy.manifest.metadata.get("source"),
        "dataset": policy.manifest.metadata.get("dataset"),
    }
    return StageOutcome(reused=is_reused, artefacts=keys, metrics=metrics)


def _first_versions(context: StageContext) -> None:
    """Publish version 0 of policy and critic, and make it the head: from then on the run has begun."""
    policy = _first_policy(context)
    if context.job.ppo is not None:
        _first_critic(context, policy)
    advance_head(context.home, context.run.name, 0)


def _first_critic(context: StageContext, policy: Policy) -> None:
    """Publish critic version 0: its own weights, or the actor's with a head of zeros; and a fresh optimizer."""
    critic = context.job.planner.models.critic
    own = Path(critic.path).expanduser() if critic is not None and critic.path is not None else None
    folder = context.state_dir / "work" / context.run.name / "critic-source"
    model_dir, facts = make_first_critic(context, own or policy_directory(context, policy), folder)
    with context.phase("engines"):
        engine = context.engines.critic_training(model_dir)
    with context.phase("load_checkpoint"):
        digest = weights_hash({path.name: path for path in sorted(model_dir.glob("*.safetensors"))})
        engine.load_checkpoint(model_dir, None, 0, digest)
    context.home.delete(manifest_key(critic_folder(context.run.name, 0)))
    publish_critic_version(
        context,
        engine,
        0,
        dataset_fingerprint=str(policy.manifest.metadata["dataset"]["dataset_fingerprint"]),
        canary=canary_of(policy),
        metadata={"source": facts, "iteration": None},
    )
    # The engine lives on with this directory's config; the weights are in the store now.
    for path in model_dir.glob("*.safetensors"):
        path.unlink()


def _first_policy(context: StageContext) -> Policy:
    """Publish version 0: the source's weights and a fresh optimizer; it isn't the head yet."""
    folder = context.state_dir / "work" / context.run.name / "source"
    model_dir, facts = materialise_source(context, folder)
    with context.phase("prompts"):
        cache = prompt_cache(context.state_dir, context.run.name)
        prompts = open_prompts(context.job, model_dir, cache, context.deadline)
    with context.phase("engines"):
        engine = context.engines.first_training(model_dir)
    with context.phase("load_checkpoint"):
        digest = weights_hash({path.name: path for path in sorted(model_dir.glob("*.safetensors"))})
        engine.load_checkpoint(model_dir, None, 0, digest)
    _discard_unfinished(context)
    policy = publish_version(
        context,
        engine,
        0,
        dataset_fingerprint=prompts.dataset_fingerprint,
        canary_rows=canary_rows(
            [row.token_ids for row in prompts.train[:NUM_ROWS]],
            vocab_size=context.job.planner.models.actor.llm.vocab,
            max_completion_tokens=context.job.planner.lengths.response,
        ),
        metadata={"source": facts, "dataset": dict(prompts.facts), "iteration": None, **_reward_model_facts(context)},
        is_head=False,
        buffer=RolloutBuffer(version=0),
    )
    if has_several_machines(context.plan.tasks[RlTask.ACTOR_TRAINING]):
        context.engines.discard(engine)  # it made the first version only; a gang trains
    # An engine lives on with this directory's config and tokenizer; the weights are in the store now.
    for path in model_dir.glob("*.safetensors"):
        path.unlink()
    return policy


def _reward_model_facts(context: StageContext) -> dict[str, str]:
    return {} if context.job.reward_model is None else {WEIGHTS_KEY: reward_model_files(context)[1]}


def materialise_source(context: StageContext, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the directory of the source's model and what is known of it; a child process makes it.

    Raises:
        SpecFaultsError: the model does not fit the job, or its warm-up failed.
        DataError: the source can't be read.
    """
    facts_path = folder / FACTS_NAME
    spec = _model_spec(context)
    is_complete = facts_path.exists() and any((folder / MODEL_NAME).glob("*.safetensors"))
    if is_complete and (folder / SPEC_NAME).read_text(encoding="utf-8") == spec:
        return folder / MODEL_NAME, json.loads(facts_path.read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / SPEC_NAME).write_text(spec, encoding="utf-8")
    with context.phase("source"):
        done = subprocess.run(
            [sys.executable, "-m", "stages.models", "--folder", str(folder)],
            stdout=sys.stderr,
            timeout=context.deadline.remaining_s("the first model"),
            env={**os.environ, "OMP_NUM_THREADS": str(_threads(context)), "OMP_WAIT_POLICY": "PASSIVE"},
            check=False,
        )
    if done.returncode:
        raise_recorded_failure(folder / FAILURE_NAME, f"making the first model (exit code {done.returncode})")
    return folder / MODEL_NAME, json.loads(facts_path.read_text(encoding="utf-8"))


def _model_spec(context: StageContext) -> str:
    job = context.job
    document = {
        "source": job.source.model_dump(mode="json"),
        "shape": job.planner.models.actor.llm.model_dump(mode="json"),
        "seed": job.seed,
        "threads": _threads(context),
        "data": job.data.model_dump(mode="json"),
        "template": job.template.model_dump(mode="json"),
    }
    return json.dumps(document, sort_keys=True)


def _threads(context: StageContext) -> int:
    """Return the threads that the plan gives training on this machine."""
    replica = context.plan.tasks[RlTask.ACTOR_TRAINING].replicas[0]
    return len(replica.stages[0].gpus) if context.machine.gpu == CPU else os.cpu_count() or 1


def _discard_unfinished(context: StageContext) -> None:
    """Unpublish what an attempt that died left of version 0; nothing can have been built on it."""
    run, home = context.run.name, context.home
    home.delete(manifest_key(policy_folder(run, 0)))
    try:
        load_checkpoint(home, run, 0)
    except (ObjectMissingError, CorruptObjectError):
        return
    home.delete(manifest_key(checkpoint_folder(run, 0)))
