"""What any generation or scoring engine refuses before it starts to work: all faults of a batch in one error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stages.engines.launch import EngineLaunch
from stages.engines.protocol import GenerationRequest, ScoredTokens
from stages.errors import ContractError

_MAX_SEED = 2**64 - 1
_MAX_LISTED = 5


def check_generation(requests: Sequence[GenerationRequest], launch: EngineLaunch, vocabulary: int) -> None:
    """Raise `ContractError` on requests that the engine can't or must not answer."""
    faults = (
        f"request {index}: {fault}"
        for index, request in enumerate(requests)
        for fault in _generation_faults(request, launch, vocabulary)
    )
    _raise_if_any(list(faults), len(requests))


def check_scoring(rows: Sequence[ScoredTokens], launch: EngineLaunch, vocabulary: int) -> None:
    """Raise `ContractError` on rows that the engine can't score."""
    faults = (
        f"row {index}: {fault}" for index, row in enumerate(rows) for fault in _scoring_faults(row, launch, vocabulary)
    )
    _raise_if_any(list(faults), len(rows))


def _generation_faults(request: GenerationRequest, launch: EngineLaunch, vocabulary: int) -> Iterator[str]:
    yield from _token_faults("prompt", request.prompt_token_ids, 1, launch.max_prompt_tokens, vocabulary)
    if not 1 <= request.max_tokens <= launch.max_completion_tokens:
        yield f"max_tokens is {request.max_tokens}, must be 1 to {launch.max_completion_tokens}"
    elif len(request.sampled_token_ids) >= request.max_tokens:
        yield f"{len(request.sampled_token_ids)} tokens are sampled already, but max_tokens is {request.max_tokens}"
    if request.sampled_token_ids:
        yield from _token_faults("completion so far", request.sampled_token_ids, 1, request.max_tokens, vocabulary)
    if not 0 <= request.seed <= _MAX_SEED:
        yield f"seed is {request.seed}, must be 0 to 2^64 - 1"
    if not 0 <= request.temperature < float("inf"):
        yield f"temperature is {request.temperature}, must be finite and not negative"
    if not 0 < request.top_p <= 1:
        yield f"top_p is {request.top_p}, must be in (0, 1]"
    if request.top_k < 0:
        yield f"top_k is {request.top_k}, must be 0 (all) or more"


def _scoring_faults(row: ScoredTokens, launch: EngineLaunch, vocabulary: int) -> Iterator[str]:
    yield from _token_faults("prompt", row.prompt_token_ids, 1, launch.max_prompt_tokens, vocabulary)
    yield from _token_faults("completion", row.completion_token_ids, 0, launch.max_completion_tokens, vocabulary)
    if not 0 < row.temperature < float("inf"):
        yield f"temperature is {row.temperature}, must be finite and above 0"


def _token_faults(what: str, ids: Sequence[int], least: int, most: int, vocabulary: int) -> Iterator[str]:
    if not least <= len(ids) <= most:
        yield f"the {what} has {len(ids)} tokens, must have {least} to {most}"
    if len(ids) and (min(ids) < 0 or max(ids) >= vocabulary):
        yield f"the {what} has ids from {min(ids)} to {max(ids)}, must be in [0, {vocabulary})"


def _raise_if_any(faults: list[str], num: int) -> None:
    if faults:
        listing = "".join(f"\n  - {fault}" for fault in faults[:_MAX_LISTED])
        rest = f"\n  and {len(faults) - _MAX_LISTED} more" if len(faults) > _MAX_LISTED else ""
        raise ContractError(f"{len(faults)} fault(s) in {num} rows for an engine:{listing}{rest}", faults=faults)
