"""Verifier pool: scores completions in child processes, each under a deadline.

A hang becomes `timed_out`, a death or an exception `crashed`; neither becomes a value. A dead process is replaced.
Works from any thread and uses no signal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from stages.data.gold_fault import GoldFault
from stages.data.rows import PromptRow
from stages.errors import SpecFaultsError
from stages.rewards.process import VerifierDiedError, VerifierProcess, VerifierTimeoutError
from stages.rewards.protocol import RewardResult, ScoringItem
from stages.rewards.registry import reward_faults
from stages.rewards.scorer import unscored
from stages.rewards.spec import RewardsSpec
from storage.rollout_schema import RewardStatus

T = TypeVar("T")
R = TypeVar("R")


class VerifierPool:
    """The verifier processes of a job; a context manager.

    Example:
        >>> with VerifierPool(spec, allow_python_callables=False) as pool:  # doctest: +SKIP
        ...     results = pool.score(items)
    """

    def __init__(self, spec: RewardsSpec, *, allow_python_callables: bool) -> None:
        """Check the section; starts nothing.

        Args:
            spec: The rewards.
            allow_python_callables: Whether this deployment lets job files name functions to run.

        Raises:
            SpecFaultsError: Every fault of the section.
        """
        faults = reward_faults(spec, allow_python_callables=allow_python_callables)
        if faults:
            raise SpecFaultsError("the reward section", faults)
        self._spec = spec
        self._idle: SimpleQueue[VerifierProcess] = SimpleQueue()
        self._all = [VerifierProcess(spec) for _ in range(spec.num_verifier_processes)]
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        """Start the first process, so that a set-up fault shows at once; the others start when needed.

        Raises:
            RewardError: The verifiers can't be set up (a missing package, a function that can't be loaded).
        """
        self._all[0].__enter__()
        for process in self._all:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(max_workers=len(self._all), thread_name_prefix="verifier")
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.stop()

    def score(self, items: Sequence[ScoringItem]) -> list[RewardResult]:
        """Results in the order of the items.

        Raises:
            RewardError: A process can't be replaced.
        """
        return self._map(self._score_one, items)

    def gold_faults(self, rows: Sequence[PromptRow]) -> list[GoldFault]:
        """Rows whose gold answer can't be parsed or doesn't score 1, in the order of the rows.

        Raises:
            RewardError: A process can't be replaced.
        """
        return [fault for fault in self._map(self._check_one, rows) if fault is not None]

    def _map(self, function: Callable[[T], R], inputs: Sequence[T]) -> list[R]:
        if self._threads is None:
            raise ValueError("the verifier pool isn't started: use it as a context manager")
        return list(self._threads.map(function, inputs))

    def _score_one(self, item: ScoringItem) -> RewardResult:
        early = unscored(item, self._spec)
        if early is not None:
            return early
        reply = self._ask_with_retries({"op": "score", "item": item.to_json()})
        return reply if isinstance(reply, RewardResult) else RewardResult.from_json(reply["result"])

    def _check_one(self, row: PromptRow) -> GoldFault | None:
        reply = self._ask_with_retries({"op": "gold", "row": row.to_json()})
        reasons = [f"{reply.status}: {reply.error}"] if isinstance(reply, RewardResult) else reply["faults"]
        return GoldFault(prompt_id=row.prompt_id, reasons=tuple(reasons)) if reasons else None

    def _ask_with_retries(self, request: dict[str, Any]) -> dict[str, Any] | RewardResult:
        """The child's reply, or the failure that stands after the last attempt."""
        failure: RewardResult | None = None
        with self._borrowed() as process:
            for _ in range(self._spec.max_attempts):
                try:
                    return process.ask(request, self._spec.deadline_s)
                except VerifierTimeoutError as error:
                    failure = RewardResult(value=None, status=RewardStatus.TIMED_OUT, error=str(error))
                except VerifierDiedError as error:
                    failure = RewardResult(value=None, status=RewardStatus.CRASHED, error=f"verifier process {error}")
        if failure is None:
            raise ValueError(f"max_attempts is {self._spec.max_attempts}; at least one attempt is needed")
        return failure

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[VerifierProcess]:
        process = self._idle.get()
        try:
            yield process
        finally:
            self._idle.put(process)
