"""Small, complete inputs for tests of storage."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from storage.rollout_schema import prompt_id, row_id, sample_seed
from storage.rollouts import write_family, write_rollouts
from storage.runs import RunRecord, create_run
from storage.store import Store

RUN = "run-1"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def rollout_row(prompt: int = 0, sample: int = 0, iteration: int = 0, **changes: Any) -> dict[str, Any]:
    """One valid row of the rollouts."""
    name = prompt_id("arithmetic", prompt)
    return {
        "prompt_id": name,
        "prompt_index": prompt,
        "sample_index": sample,
        "prompt_text": f"{prompt} + 1 = ",
        "completion_text": str(prompt + 1),
        "gold_answer": str(prompt + 1),
        "prompt_token_ids": [10 + prompt, 11],
        "completion_token_ids": [20 + prompt, 21 + sample],
        "sampler_logprobs": [-0.5, -0.25],
        "finish_reason": "stop",
        "policy_version_first": iteration,
        "policy_version_last": iteration,
        "weights_hash": "0" * 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": sample_seed(7, iteration, name, sample),
        "engine": "transformers",
        "engine_version": "5.0",
        "dtype": "float32",
        "logprob_mode": "processed",
        "machine": "m-0",
        "started_at": NOW,
        "ended_at": NOW,
        **changes,
    }


def rollout_rows(prompts: range, num_samples: int = 2, iteration: int = 0) -> list[dict[str, Any]]:
    """Valid rows for some prompts."""
    return [rollout_row(prompt, sample, iteration) for prompt in prompts for sample in range(num_samples)]


def reward_row(prompt: int = 0, sample: int = 0, iteration: int = 0, **changes: Any) -> dict[str, Any]:
    """One valid row of the reward family."""
    return {
        "row_id": row_id(RUN, iteration, prompt_id("arithmetic", prompt), sample),
        "reward": float(sample),
        "reward_status": "ok",
        "reward_parts": {"answer": float(sample)},
        "verifier": "exact/1",
        **changes,
    }


def write_iteration_data(store: Store, iteration: int = 0, num_prompts: int = 4, num_shards: int = 2) -> None:
    """Commit rollouts in shards and the rewards in one shard."""
    per_shard = num_prompts // num_shards
    for shard in range(num_shards):
        rows = rollout_rows(range(shard * per_shard, (shard + 1) * per_shard), iteration=iteration)
        write_rollouts(store, RUN, iteration, shard, num_shards, rows, input_fingerprint="f", created_by="test")
    rewards = [reward_row(prompt, sample, iteration) for prompt in range(num_prompts) for sample in range(2)]
    write_family(store, RUN, iteration, "reward", 0, 1, rewards, input_fingerprint="f", created_by="test")


def new_run(store: Store, run: str = RUN) -> RunRecord:
    """Create a run."""
    record = RunRecord(
        run=run,
        job={"format": "motley.job/1", "name": "tiny"},
        cluster={"format": "motley.cluster/1", "name": "one"},
        num_iterations=2,
        seeds={"sampling": 7},
        created_at=NOW,
    )
    return create_run(store, record)


def safetensors_bytes(values: dict[str, list[int]], dtype: str = "U8") -> bytes:
    """A safetensors file of one-byte tensors, built by its layout and not by the code under test."""
    header, data = {}, b""
    for name, numbers in values.items():
        header[name] = {"dtype": dtype, "shape": [len(numbers)], "data_offsets": [len(data), len(data) + len(numbers)]}
        data += bytes(numbers)
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def policy_files(value: int = 1) -> dict[str, bytes]:
    """A complete small policy."""
    return {"model.safetensors": safetensors_bytes({"w": [value, 2], "b": [3]}), "config.json": b"{}\n"}
