"""Rewards by name, and the check of a job's reward options before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from stages.errors import SpecFaultsError
from stages.rewards.exact_answer import ExactAnswer, ExactAnswerOptions
from stages.rewards.format import Format, FormatOptions
from stages.rewards.math_verify import MathVerify, MathVerifyOptions
from stages.rewards.protocol import RewardOptions, Verifier
from stages.rewards.python_callable import PythonCallable, PythonCallableOptions
from stages.rewards.reasoning_gym import ReasoningGym, ReasoningGymOptions
from stages.rewards.spec import RewardSpec, RewardsSpec


@dataclass(frozen=True, slots=True)
class RewardEntry:
    """A registered reward."""

    options_model: type[RewardOptions]
    """Model of its options."""

    make: Callable[[Any], Verifier]
    """Makes the verifier from those options; imports its packages."""


ALLOW_CALLABLES_VARIABLE: Final = "MOTLEY_ALLOW_PYTHON_CALLABLES"
"""Environment variable; 1 lets job files name Python functions as rewards. Set by the owner of a deployment."""

REWARDS: Final[Mapping[str, RewardEntry]] = {
    "exact_answer": RewardEntry(ExactAnswerOptions, ExactAnswer),
    "format": RewardEntry(FormatOptions, Format),
    "math_verify": RewardEntry(MathVerifyOptions, MathVerify),
    "python_callable": RewardEntry(PythonCallableOptions, PythonCallable),
    "reasoning_gym": RewardEntry(ReasoningGymOptions, ReasoningGym),
}
"""Reward by its name in `RewardSpec.name`."""


def reward_faults(spec: RewardsSpec, *, allow_python_callables: bool) -> list[str]:
    """Every fault of the reward section that the spec class can't see; empty = none. Imports no heavy package.

    Args:
        spec: The section.
        allow_python_callables: Whether this deployment lets job files name functions to run.
    """
    faults: list[str] = []
    for position, term in enumerate(spec.terms):
        where = f"rewards.terms.{position}"
        if term.name not in REWARDS:
            faults.append(f"{where}.name is {term.name!r}; known rewards: {', '.join(REWARDS)}")
            continue
        if term.name == "python_callable" and not allow_python_callables:
            faults.append(
                f"{where}.name is 'python_callable', which runs code that the job file names; this deployment doesn't "
                f"allow it: start it with {ALLOW_CALLABLES_VARIABLE}=1 in the environment, or use another reward"
            )
        try:
            REWARDS[term.name].options_model.model_validate(term.options)
        except ValidationError as error:
            faults.extend(_option_fault(where, fault["loc"], fault["msg"]) for fault in error.errors())
    return faults


def _option_fault(where: str, location: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join([where, 'options', *map(str, location)])}: {message}"


def make_verifier(term: RewardSpec) -> Verifier:
    """The verifier of one term.

    Raises:
        SpecFaultsError: The name or the options are wrong.
    """
    spec = RewardsSpec(terms=(term,))
    faults = reward_faults(spec, allow_python_callables=True)
    if faults:
        raise SpecFaultsError("the reward section", faults)
    entry = REWARDS[term.name]
    return entry.make(entry.options_model.model_validate(term.options))
