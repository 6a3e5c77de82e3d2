"""Whether generation and training keep step: rates, idle time, who waits for whom, and when a drift calls for a plan.

Producer is what fills the buffer (generate, infer), consumer what empties it (train, commit, weight sync). Pure
functions of measured seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Final

PRODUCER_STAGES: Final = ("generate", "infer")
"""Stages whose seconds make up the producer's part of an iteration."""
CONSUMER_STAGES: Final = ("train", "commit_policy", "weight_sync")
"""Stages whose seconds make up the consumer's part of an iteration."""
_SIDE_BY_SIDE: Final[Mapping[str, Sequence[str]]] = {
    "infer": ("infer", "reward_inference", "reference_inference", "critic_inference"),
    "train": ("train", "critic_training"),
}
PRODUCER_PHASES: Final = ("generation_s", "inference_s")
"""Phases of a plan's prediction that are the producer's."""
CONSUMER_PHASES: Final = ("training_s", "transfer_s")
"""Phases of a plan's prediction that are the consumer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Producer against consumer in one iteration."""

    samples: int
    """Completions of the iteration."""
    producer_s: float
    """Seconds of generation and inference, > 0."""
    consumer_s: float
    """Seconds of training, commit and weight sync, > 0."""

    @property
    def producer_samples_per_s(self) -> float:
        """Completions that generation could make per second if it never waited."""
        return self.samples / self.producer_s

    @property
    def consumer_samples_per_s(self) -> float:
        """Completions that training could use per second if it never waited."""
        return self.samples / self.consumer_s

    @property
    def log_ratio(self) -> float:
        """log(producer seconds / consumer seconds): positive = generation is the slower side."""
        return log(self.producer_s / self.consumer_s)


def measured_balance(samples: int, measured_s: Mapping[str, float]) -> Balance | None:
    """Return the balance of an iteration from its stages' seconds, None while a side is unknown."""
    return _balance(samples, _with_groups(measured_s), PRODUCER_STAGES, CONSUMER_STAGES)


def _with_groups(measured_s: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds with PPO's tasks side by side under the names of GRPO's stages: the longest one counts."""
    merged = dict(measured_s)
    for name, stages in _SIDE_BY_SIDE.items():
        found = [measured_s[stage] for stage in stages if stage in measured_s]
        if found:
            merged[name] = max(found)
    return merged


def predicted_balance(samples: int, phases_s: Mapping[str, float]) -> Balance | None:
    """Return the balance that a plan promises, from its predicted phases."""
    return _balance(samples, phases_s, PRODUCER_PHASES, CONSUMER_PHASES)


def _balance(
    samples: int, seconds: Mapping[str, float], producer: Sequence[str], consumer: Sequence[str]
) -> Balance | None:
    producer_s = sum(seconds.get(name, 0.0) for name in producer)
    consumer_s = sum(seconds.get(name, 0.0) for name in consumer)
    if producer_s <= 0.0 or consumer_s <= 0.0:
        return None
    return Balance(samples=samples, producer_s=producer_s, consumer_s=consumer_s)


def who_waits(balance: Balance, tolerance: float = 0.1) -> str:
    """Return one sentence: which side is faster and so waits, and by how much.

    Args:
        balance: Of an iteration.
        tolerance: Relative gap below which both sides count as equally fast.
    """
    slow, fast = max(balance.producer_s, balance.consumer_s), min(balance.producer_s, balance.consumer_s)
    if slow <= fast * (1.0 + tolerance):
        return f"generation and training keep step ({balance.producer_s:.1f} s and {balance.consumer_s:.1f} s)"
    waits, works = ("training", "generation") if balance.log_ratio > 0 else ("generation", "training")
    return f"{waits} waits for {works} ({fast:.1f} s of work against {slow:.1f} s)"


def drift(measured: Balance, predicted: Balance) -> float:
    """Return how far the balance is from the promised one: |log(measured ratio / predicted ratio)|, >= 0."""
    return abs(measured.log_ratio - predicted.log_ratio)


def drift_is_due(drifts: Sequence[float], *, limit: float, confirm: int) -> bool:
    """Whether the last of a plan's iterations is the one at which its drift calls for another plan.

    With hysteresis: the drift must lie above log(1 + limit) in `confirm` iterations in a row, and after it has called
    once it must first fall below half of that before it can call again. One odd iteration changes nothing, and a plan
    that can't be bettered isn't searched for again and again.

    Args:
        drifts: `drift` of every iteration since the plan was adopted, oldest first.
        limit: Relative gap, `replan.drift` of the job, > 0.
        confirm: Iterations in a row, >= 1.

    Example:
        limit 1 (a factor of two), confirm 2: drifts [0.8, 0.8] call at the second; [0.8, 0.8, 0.8] don't call at the
        third; [0.8, 0.8, 0.1, 0.8, 0.8] call at the fifth.
    """
    high = log(1.0 + limit)
    is_armed, above, calls = True, 0, False
    for value in drifts:
        above = above + 1 if value > high else 0
        calls = is_armed and above >= confirm
        if calls:
            is_armed = False
        elif value < high / 2:
            is_armed = True
    return calls
