"""Errors of the stages: one root, a branch per party who can act.

The stage process turns an error into an exit code and a JSON record (see `stages.contract`); the Airflow side maps the
class to a retry decision. Every error carries its facts as attributes, so nothing is parsed out of a message.

```
StageError
├── EngineUnavailableError   not up, out of capacity, killed: a retry can succeed
├── EngineError              out of memory, a rank's exception, a wrong answer of the engine
├── StaleRolloutError        rollouts older than the staleness bound
├── ContractError            a request or result that does not match its schema
├── NumericsError            non-finite loss or gradient, ratio outside its bound
├── WeightMismatchError      an engine's weights are not those of the trainer
├── DeadlineError            a wait that passed its deadline; names who was waited for
├── DataError                dataset rows that can't be used
├── RewardError              a verifier set-up that can't be used
└── SpecFaultsError (ValueError)  a job file whose execution sections can't be used; lists every fault
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class StageError(Exception):
    """Root of all errors that a stage raises; `attributes` hold the facts behind the message."""

    exit_code = 1
    """Exit code of the stage process: 1 = valid request that can't be met, 2 = bad input."""

    def __init__(self, message: str, **attributes: Any) -> None:  # noqa: ANN401 - facts of any JSON type
        super().__init__(message)
        self.attributes: Mapping[str, Any] = attributes


class EngineUnavailableError(StageError):
    """The engine is not up, was killed or has no capacity; another attempt can succeed."""


class EngineError(StageError):
    """The engine answered with a failure (out of memory, an exception of a rank); attributes name rank and cause."""


class StaleRolloutError(StageError):
    """Rollouts are older than the job's staleness bound allows."""


class ContractError(StageError):
    """A request, result or artefact does not match its schema or belongs to other inputs."""

    exit_code = 2


class NumericsError(StageError):
    """Loss or gradient is not finite, or a ratio left its bound; attributes name the dump of the rows concerned."""


class WeightMismatchError(StageError):
    """The weights an engine serves are not the ones the trainer published."""


class DeadlineError(StageError):
    """A wait passed its deadline; the message names who was waited for."""


class DataError(StageError):
    """Dataset rows that can't be used; the message has counts and the first examples."""

    exit_code = 2


class RewardError(StageError):
    """A reward or verifier that can't be used as configured."""

    exit_code = 2


class SpecFaultsError(StageError, ValueError):
    """A job file whose execution sections can't be used; `faults` holds every fault, one sentence each."""

    exit_code = 2

    def __init__(self, source: str, faults: Sequence[str]) -> None:
        self.source = source
        self.faults = list(faults)
        listing = "".join(f"\n  - {fault}" for fault in self.faults)
        super().__init__(f"{source} has {len(self.faults)} fault(s):{listing}", source=source, faults=self.faults)

    def __reduce__(self) -> tuple[type[SpecFaultsError], tuple[str, list[str]]]:
        """Go to another process whole; exceptions are made again from their message alone otherwise."""
        return type(self), (self.source, self.faults)
