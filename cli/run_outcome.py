"""What is said at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.run_entry import RunEntry
from storage.iterations import find_records
from storage.policies import head_version
from storage.runs import IterationRecord
from storage.store import Store


def outcome_of(entry: RunEntry, store: Store, url: str | None) -> dict[str, Any]:
    """Return the outcome of a run as a JSON document, from the committed data."""
    records = find_records(store, entry.run)
    head = head_version(store, entry.run)
    return {
        "run": entry.run,
        "state": "finished" if (head or 0) >= entry.iterations else "unfinished",
        "iterations": entry.iterations,
        "policy_version": head,
        "reward_first": _first(records, "reward_mean"),
        "reward_last": _last(records, "reward_mean"),
        "eval_reward_before": _first(records, "eval_reward_mean_before", "eval_reward_mean"),
        "eval_reward_after": _last(records, "eval_reward_mean"),
        "rollouts": f"{store.url.rstrip('/')}/{entry.run}/iterations",
        "url": url,
    }


def outcome_text(outcome: dict[str, Any]) -> str:
    """Return the outcome as text."""
    run = outcome["run"]
    lines = [f"Run {run}: {outcome['state']}, policy version {outcome['policy_version']} of {outcome['iterations']}."]
    if outcome["eval_reward_before"] is not None and outcome["eval_reward_after"] is not None:
        lines.append(
            f"  held-out score   {outcome['eval_reward_before']:.3f} -> {outcome['eval_reward_after']:.3f} (before "
            "-> after)"
        )
    if outcome["reward_first"] is not None and outcome["reward_last"] is not None:
        lines.append(
            f"  training reward  {outcome['reward_first']:.3f} -> {outcome['reward_last']:.3f} (first -> last "
            "iteration)"
        )
    lines.append(f"  rollouts         {outcome['rollouts']}")
    lines.append(f"                   motley rollouts stats {run}   |   motley show {run}")
    if outcome["url"]:
        lines.append(f"  Airflow          {outcome['url']}")
    return "\n".join(lines)


def _first(records: Sequence[IterationRecord], *names: str) -> float | None:
    return next((value for r in records for name in names if (value := r.metrics.get(name)) is not None), None)


def _last(records: Sequence[IterationRecord], name: str) -> float | None:
    return next((value for r in reversed(records) if (value := r.metrics.get(name)) is not None), None)
