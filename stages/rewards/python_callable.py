"""Reward `python_callable`: a function of the author, named `module:function`.

Runs code of the job file's author, so a deployment has to allow it. It runs in the verifier process, under its
deadline.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from pydantic import Field

from stages.data.rows import PromptRow
from stages.errors import RewardError
from stages.rewards.protocol import RewardOptions, ScoringItem, Verdict


class PythonCallableOptions(RewardOptions):
    """Options of `python_callable`."""

    target: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`, importable by the verifier process. It is called as
    `function(completion, answer, row, **kwargs)` with the completion's text, the gold answer (or None) and the row as a
    JSON object, and returns a number, a bool, or None for "no answer found"."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments."""

    example: str | None = None
    """A completion for which the function must return 1 for every row, for the canary; `{answer}` is replaced by the
    gold answer. Null = no canary."""


class PythonCallable:
    """Calls the author's function."""

    def __init__(self, options: PythonCallableOptions) -> None:
        self._options = options
        self._function = _load(options.target)

    def verify(self, item: ScoringItem) -> Verdict:
        """The function's value."""
        value = self._function(item.text, item.row.answer, item.row.to_json(), **self._options.kwargs)
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"{self._options.target} returned {type(value).__name__}; return a number, a bool or None")
        return Verdict(value=None if value is None else float(value))

    def gold_fault(self, row: PromptRow) -> str | None:
        """None: what the function needs is not known."""
        del row
        return None

    def known_good(self, row: PromptRow) -> str | None:
        """The author's example."""
        example = self._options.example
        return None if example is None else example.replace("{answer}", row.answer or "")


def _load(target: str) -> Callable[..., Any]:
    module_name, _, function_name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise RewardError(
            f"rewards: python_callable {target!r} can't be loaded: {error}. Install the module where the stages run, "
            "or put its folder on PYTHONPATH"
        ) from error
    if not callable(function):
        raise RewardError(f"rewards: python_callable {target!r} is a {type(function).__name__}, not a function")
    loaded: Callable[..., Any] = function
    return loaded
