"""Deployments for tests of the pages: entries, records, plans, policies and rollouts in a directory, no Airflow."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request
from fastapi.testclient import TestClient

from plans.plan import Plan
from plans.search.budget import Budget
from plans.search.planner import make_plan
from plugins.pages.access import Access, QueueState, WorkerState
from plugins.pages.app import build_app
from plugins.pages.faults import PageError
from plugins.pages.run_source import RunSource
from stages.home import MotleyHome, dag_id_of
from stages.plan_history import with_adoption
from stages.run_entry import MachineEntry, RunEntry
from storage.policies import publish_policy
from storage.rollout_schema import prompt_id, row_id
from storage.rollouts import write_family, write_rollouts
from storage.runs import (
    IterationRecord,
    RunRecord,
    create_run,
    decide_plan,
    write_iteration,
    write_plan,
    write_profile,
)
from storage.store import Store, open_store
from tests.helpers.planner_cases import paper_cluster, paper_job
from tests.helpers.storage_builders import NOW, RUN, policy_files, rollout_row

DAG_ID = dag_id_of(RUN)
REGIONS = ("virginia", "ohio")
CLUSTER = paper_cluster([("A100-40", "virginia", 4), ("L4", "ohio", 2)])
JOB = paper_job("qwen3-4b", algorithm="grpo", prompts=16, responses=2, response=128)
WORDS = ("<s>", "the", "answer", "is", "two", "<script>alert(1)</script>", "no", "idea")


def tokenizer_json() -> bytes:
    """A tokenizer of a few words with a space before each but the first."""
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<s>"},
    }).encode()  # fmt: skip


def completion(prompt: int, sample: int, iteration: int) -> dict[str, Any]:
    """One row; its text is that of its tokens."""
    ids = [1, 2, 3, 4] if (prompt + sample + iteration) % 2 else [1, 2, 3, 5, 6, 7]
    return rollout_row(
        prompt, sample, iteration, completion_token_ids=ids, completion_text=" ".join(WORDS[i] for i in ids),
        sampler_logprobs=[-0.05, -0.5, -2.0, -7.0, -1.0, -0.1][: len(ids)],
        finish_reason="length" if prompt % 5 == 4 else "stop", region=REGIONS[prompt % 2], machine=f"m{prompt % 2}",
    )  # fmt: skip


def write_rows(store: Store, iteration: int, num_prompts: int, *, has_rewards: bool = True) -> None:
    """Commit the rollouts of an iteration in two shards, with rewards, reference and training columns."""
    pairs = [(prompt, sample) for prompt in range(num_prompts) for sample in range(2)]
    half = len(pairs) // 2
    facts: dict[str, Any] = {"input_fingerprint": "f", "created_by": "test"}
    for shard, part in enumerate((pairs[:half], pairs[half:])):
        write_rollouts(store, RUN, iteration, shard, 2, [completion(p, s, iteration) for p, s in part], **facts)
    if not has_rewards:
        return
    ids = {pair: row_id(RUN, iteration, prompt_id("arithmetic", pair[0]), pair[1]) for pair in pairs}
    rewards = [
        {
            "row_id": ids[p, s], "reward": None if p % 7 == 3 else p / num_prompts + s / 100,
            "reward_status": "unparsable" if p % 7 == 3 else "ok", "verifier": "exact/1",
        }
        for p, s in pairs
    ]  # fmt: skip
    write_family(store, RUN, iteration, "reward", 0, 1, rewards, **facts)
    rows = {pair: completion(*pair, iteration) for pair in pairs}
    reference = [
        {"row_id": ids[pair], "reference_logprobs": [x - 0.1 for x in row["sampler_logprobs"]]}
        for pair, row in rows.items()
    ]
    write_family(store, RUN, iteration, "reference", 0, 1, reference, **facts)
    training = [
        {
            "row_id": ids[p, s], "advantage": None if p == 0 else 1.0 - 2.0 * s, "is_dropped": p == 0,
            "dropped_reason": "zero_variance" if p == 0 else None, "staleness": 0,
        }
        for p, s in pairs
    ]  # fmt: skip
    write_family(store, RUN, iteration, "training", 0, 1, training, **facts)


def record_of(iteration: int, **changes: Any) -> IterationRecord:
    """The record of an iteration."""
    start = NOW + timedelta(seconds=40 * iteration)
    facts: dict[str, Any] = {
        "plan": 0, "policy_version_start": iteration, "policy_version_end": iteration + 1, "started_at": start,
        "ended_at": start + timedelta(seconds=30),
        "measured_s": {"plan": 1.0, "generate": 10.0, "infer": 2.0, "train": 8.0, "commit_policy": 1.0},
        "predicted_s": {"generate": 9.0, "infer": 2.5, "train": 7.0},
        "metrics": {
            "reward_mean": 0.2 + iteration / 200, "eval_reward_mean": 0.3 if iteration % 2 else None,
            "response_tokens_mean": 50.0, "response_tokens_p95": 90.0, "kl": 0.01 * iteration, "entropy": 1.5,
            "loss": -0.1, "lag_mean": 0.0, "lag_max": 0.0, "lag_limit": 0.0, "tokens_per_s": 900.0,
            "overhead_fraction": 0.1, "dropped_fraction": 0.05, "truncated_fraction": 0.1,
        },
        "metadata": {"gaps_s": {"plan->generate": 0.5, "generate->infer": 1.0, "infer->train": 0.5}},
        "alarms": ["constant_reward in 3 iterations in a row: all rewards are equal"] if iteration == 1 else [],
    }  # fmt: skip
    return IterationRecord(run=RUN, iteration=iteration, **{**facts, **changes})


def make_plans() -> tuple[Plan, Plan]:
    """Two priced plans of the same job."""
    found = [make_plan(CLUSTER, JOB, "random", budget=Budget(evaluations=30), seed=seed).plan for seed in (0, 1)]
    return with_adoption(found[0], 0, "the first plan of the run"), with_adoption(found[1], 2, "the cluster changed")


def write_run(
    home: MotleyHome, *, iterations: int = 4, num_prompts: int = 20, done: int | None = None, has_plans: bool = True
) -> Store:
    """Write a run of some committed iterations, the entry included; return its store."""
    store = open_store(str(home.store_dir))
    done = iterations if done is None else done
    entry = RunEntry(
        run=RUN,
        roots=dict.fromkeys(REGIONS, store.url),
        machines=tuple(MachineEntry(name=m.name, queue=m.queue_name, region=m.region) for m in CLUSTER.machines),
        iterations=iterations + 2,
    )
    create_run(
        store,
        RunRecord(
            run=RUN, job=JOB.model_dump(mode="json", exclude_none=True, exclude={"execution"}),
            cluster=CLUSTER.model_dump(mode="json"),
            num_iterations=iterations + 2, seeds={"run": 7}, created_at=NOW,
        ),
    )  # fmt: skip
    for version in range(done + 1):
        files = policy_files(version) | {"tokenizer.json": tokenizer_json()}
        publish_policy(store, RUN, version, files, created_by="test")
    for number, plan in enumerate(make_plans() if has_plans else ()):
        write_plan(store, RUN, number, plan.to_document())
    for iteration in range(done):
        write_rows(store, iteration, num_prompts)
        plan = 0 if iteration < 2 else 1
        decide_plan(store, RUN, iteration, plan)
        write_iteration(store, record_of(iteration, plan=plan))
    profile = {
        "format": "motley.profile/1", "machine": "m0", "device_name": "A100-SXM4-40GB", "flop_per_s": {"bf16": 2.5e14},
        "memory_bytes_per_s": 1.4e12, "memory_bytes": 4.0e10,
        "storage": {"write_bytes_per_s": 2e8, "read_bytes_per_s": 4e8},
    }  # fmt: skip
    write_profile(store, RUN, 0, profile, "m0")
    home.runs_dir.mkdir(parents=True, exist_ok=True)
    home.run_entry_file(RUN).write_text(entry.to_json(), encoding="utf-8")
    return store


def free_access(
    *,
    refusal: int | None = None,
    workers: Sequence[WorkerState] | None = None,
    iterations: dict[str, int] | None = None,
) -> Access:
    """An Airflow in which everybody may see everything, or nobody anything (`refusal`: with that status)."""

    def guard(request: Request) -> None:
        if refusal is not None:
            raise HTTPException(refusal, "refused")

    def iteration_of(dag_id: str, run_id: str) -> int:
        if run_id not in (iterations or {}):
            raise PageError(f"DAG {dag_id} has no DAG run {run_id!r}.")
        return (iterations or {})[run_id]

    found = None if workers is None else tuple(workers)
    return Access(
        is_signed_in=guard, may_see_run=guard, may_see_cluster=guard, login_url=lambda back: f"/login?next={back}",
        iteration_of=iteration_of, components=lambda: {"scheduler": "healthy", "triggerer": None},
        workers=lambda: found, queues=lambda: (QueueState(queue="m0", waiting=2, running=1),),
    )  # fmt: skip


def client_of(home: Path, access: Access | None = None, *, patience_s: float = 300.0) -> TestClient:
    """A client of the pages over the runs of a home; pages wait for their facts, so that each has its status."""
    source = RunSource(MotleyHome(home), lambda _entry, _region: {})
    app = build_app(source, access or free_access(), patience_s)
    return TestClient(app, raise_server_exceptions=True, follow_redirects=False)


def sentence(client: TestClient, path: str) -> tuple[int, str]:
    """Return status and sentence of a page that says what is wrong."""
    answer = client.get(path)
    found = re.search(r'role="alert">(.*?)</p>', answer.text, re.DOTALL)
    assert found is not None, answer.text
    return answer.status_code, html.unescape(found[1])
