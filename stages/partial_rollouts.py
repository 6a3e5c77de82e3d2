"""Completions across weight updates: ask, keep what came, ask again for the rest, and note who sampled which token.

An engine ends a call early when new weights wait to be loaded. What it sampled so far is kept, and the completion goes
on under the new weights; the draws depend on the row's seed and the position, as they do without interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from stages.engines.client import RemoteEngine
from stages.engines.protocol import Completion, GenerationRequest
from stages.errors import EngineError, WeightMismatchError
from stages.timing import Deadline


class VersionBounds(Protocol):
    """Which policy versions may sample."""

    @property
    def oldest_version(self) -> int:
        """Least version."""
        ...

    @property
    def newest_version(self) -> int:
        """Greatest version."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens in a row that the same weights sampled."""

    policy_version: int
    """Version of the weights."""
    weights_hash: str
    """Hash of the weights."""
    num_tokens: int
    """How many, > 0."""


@dataclass(slots=True)
class Sampled:
    """A finished completion."""

    token_ids: list[int] = field(default_factory=list)
    """All sampled ids."""
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each id under the weights that sampled it. [len(token_ids)]"""
    spans: list[Span] = field(default_factory=list)
    """Which weights sampled which part, in order."""
    finish_reason: Literal["stop", "length"] = "length"
    """Why it ended."""

    @property
    def token_policy_versions(self) -> list[int]:
        """Version that sampled each token, [len(token_ids)]."""
        return [span.policy_version for span in self.spans for _ in range(span.num_tokens)]

    def take(self, part: Completion) -> bool:
        """Append what a call sampled; return whether the completion is finished."""
        if part.token_ids:
            self.token_ids += part.token_ids
            self.logprobs += part.logprobs
            before = self.spans[-1] if self.spans else None
            if before and (before.policy_version, before.weights_hash) == (part.policy_version, part.weights_hash):
                self.spans[-1] = replace(before, num_tokens=before.num_tokens + len(part.token_ids))
            else:
                self.spans.append(Span(part.policy_version, part.weights_hash, len(part.token_ids)))
        if part.finish_reason == "interrupted":
            return False
        self.finish_reason = part.finish_reason
        return True


def sample_all(
    engine: Callable[[], RemoteEngine],
    requests: Sequence[GenerationRequest],
    bounds: VersionBounds,
    deadline: Deadline,
) -> list[Sampled]:
    """Sample every request to its end.

    Args:
        engine: Gives the engine for the next call, holding the weights that are to be used from then on.
        requests: What to sample.
        bounds: Policy versions that may sample.
        deadline: Of the stage.

    Returns:
        One completion per request, in their order.

    Raises:
        WeightMismatchError: an engine sampled from a version out of bounds.
        EngineError: an engine broke the protocol.
        DeadlineError: the deadline passed between two calls.
    """
    sampled = [Sampled() for _ in requests]
    todo = list(range(len(requests)))
    while todo:
        deadline.remaining_s("sampling")
        current = engine()
        asked = [replace(requests[place], sampled_token_ids=sampled[place].token_ids) for place in todo]
        parts = current.generate(asked)
        _check(asked, parts, bounds, current)
        todo = [place for place, part in zip(todo, parts, strict=True) if not sampled[place].take(part)]
    return sampled


def _check(
    requests: Sequence[GenerationRequest], parts: Sequence[Completion], bounds: VersionBounds, engine: RemoteEngine
) -> None:
    """Refuse answers that break the protocol or come from other weights, before they are stored."""
    faults = [] if len(requests) == len(parts) else [f"{len(parts)} completions for {len(requests)} requests"]
    for index, (request, part) in enumerate(zip(requests, parts, strict=False)):
        if fault := _fault(request, part):
            faults.append(f"completion {index} {fault}")
    if faults:
        raise EngineError(
            f"{engine.record.describe()} broke its contract in {len(faults)} places: {'; '.join(faults[:3])}.",
            faults=faults[:20],
        )
    used = sorted({part.policy_version for part in parts})
    foreign = [version for version in used if not bounds.oldest_version <= version <= bounds.newest_version]
    if foreign:
        raise WeightMismatchError(
            f"{engine.record.describe()} sampled from policy version {foreign[0]}, but versions "
            f"{bounds.oldest_version} to {bounds.newest_version} are allowed; repeat the stage, which loads the right "
            "ones.",
            policy_version=foreign[0],
        )


def _fault(request: GenerationRequest, part: Completion) -> str | None:
    num, before = len(part.token_ids), len(request.sampled_token_ids)
    if num != len(part.logprobs):
        return f"has {num} tokens and {len(part.logprobs)} log-probs"
    if before + num > request.max_tokens or (not num and part.finish_reason != "interrupted"):
        return f"has {before} + {num} tokens, of at most {request.max_tokens}"
    if part.finish_reason == "stop" and part.token_ids[-1] not in request.stop_token_ids:
        return f"says stop, but ends in token {part.token_ids[-1]}, which is no end token"
    if part.finish_reason == "length" and before + num != request.max_tokens:
        return f"says length, but has {before} + {num} of {request.max_tokens} tokens"  # AReaL#858
    return None
