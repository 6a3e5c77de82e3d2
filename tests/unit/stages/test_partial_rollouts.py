"""Completions across weight updates, with an engine that is interrupted on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stages.engines.client import RemoteEngine
from stages.engines.protocol import Completion, GenerationRequest
from stages.errors import DeadlineError, EngineError, WeightMismatchError
from stages.partial_rollouts import Sampled, Span, sample_all
from stages.shard_writer import RolloutBatch
from stages.timing import Clock, Deadline
from storage.layout import Split

BOUNDS = RolloutBatch(
    split=Split.TRAIN, number=5, prompts=(), samples_per_prompt=1, temperature=1.0, oldest_version=3, newest_version=5
)

Answer = Callable[[Sequence[GenerationRequest]], list[Completion]]


class Scripted:
    """Answers each call by the next step of a script; notes what was asked."""

    def __init__(self, *steps: Answer) -> None:
        self.steps = list(steps)
        self.asked: list[list[list[int]]] = []
        self.record = SimpleNamespace(describe=lambda: "engine x")

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.asked.append([list(request.sampled_token_ids) for request in requests])
        return self.steps.pop(0)(requests)


def part(tokens: list[int], reason: Any = "interrupted", version: int = 3) -> Completion:
    return Completion(
        token_ids=tokens, logprobs=[-1.0] * len(tokens), finish_reason=reason, policy_version=version,
        weights_hash=f"h{version}",
    )  # fmt: skip


def request(max_tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(prompt_token_ids=[1], seed=0, max_tokens=max_tokens, temperature=1.0, stop_token_ids=[2])


def run(engine: Scripted, requests: Sequence[GenerationRequest], left_s: float = 60.0) -> list[Sampled]:
    clock = Clock()
    deadline = Deadline(clock=clock, ends_at=clock.monotonic() + left_s)
    return sample_all(lambda: cast("RemoteEngine", engine), requests, BOUNDS, deadline)


def test_interrupted_completions_go_on_and_keep_what_they_have() -> None:
    engine = Scripted(
        lambda _: [part([7, 8]), part([9, 2], "stop"), part([])],
        lambda _: [part([5], version=4), part([4, 2], "stop", version=4)],
        lambda _: [part([2], "stop", version=5)],
    )

    first, second, third = run(engine, [request(), request(), request()])

    assert engine.asked == [[[], [], []], [[7, 8], []], [[7, 8, 5]]]
    assert (first.token_ids, first.token_policy_versions) == ([7, 8, 5, 2], [3, 3, 4, 5])
    assert first.spans == [Span(3, "h3", 2), Span(4, "h4", 1), Span(5, "h5", 1)]
    assert (second.token_ids, second.token_policy_versions) == ([9, 2], [3, 3])
    assert (third.token_ids, third.spans) == ([4, 2], [Span(4, "h4", 2)])
    assert len(first.logprobs) == 4


def test_parts_of_the_same_weights_are_one_span() -> None:
    engine = Scripted(lambda _: [part([7])], lambda _: [part([8, 2], "stop")])
    assert run(engine, [request()])[0].spans == [Span(3, "h3", 3)]


@pytest.mark.parametrize("version", [2, 6])
def test_version_out_of_bounds_is_refused(version: int) -> None:
    engine = Scripted(lambda _: [part([2], "stop", version=version)])
    with pytest.raises(WeightMismatchError, match=f"version {version}, but versions 3 to 5 are allowed"):
        run(engine, [request()])


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ([part([5, 5], "length")], "says length, but has 0 \\+ 2 of 6 tokens"),  # AReaL#858
        ([part([5] * 7)], "has 0 \\+ 7 tokens, of at most 6"),
        ([part([5], "stop")], "says stop, but ends in token 5"),
        ([part([], "stop")], "has 0 \\+ 0 tokens"),
        ([], "0 completions for 1 requests"),
    ],
)
def test_answer_that_breaks_the_protocol_is_refused(answer: list[Completion], fault: str) -> None:
    with pytest.raises(EngineError, match=fault):
        run(Scripted(lambda _: answer), [request()])


def test_engine_that_is_interrupted_again_and_again_meets_the_deadline() -> None:
    engine = Scripted(*[lambda _: [part([])]] * 3)
    with pytest.raises(DeadlineError, match="waited for sampling"):
        run(engine, [request()], left_s=-1.0)
