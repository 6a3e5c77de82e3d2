"""The only place that decides whether a failed stage is tried again.

Rules are by class, most specific first; the first match wins. A stage process leaves its error as a record, from which
`plugins.stage_failures` rebuilds the class.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

from plans import errors as planning
from stages import errors as stage
from storage import errors as store

RETRIES: Final = 3
"""Attempts after the first one that a task may make."""


def _again(exception: type[BaseException], delay_s: float, reason: str) -> RetryRule:
    return RetryRule(
        exception=exception, action=RetryAction.RETRY, retry_delay=timedelta(seconds=delay_s), reason=reason
    )


def _never(exception: type[BaseException], reason: str) -> RetryRule:
    return RetryRule(exception=exception, action=RetryAction.FAIL, reason=reason)


RULES: Final = (
    _again(stage.EngineUnavailableError, 1, "the engine or stage process is gone; a new one is started"),
    _again(stage.EngineError, 3, "the engine failed; it is replaced"),
    _again(stage.WeightMismatchError, 1, "the engine is given the weights once more"),
    _again(stage.DeadlineError, 5, "the wait is repeated"),
    _never(stage.StaleRolloutError, "the same rollouts can't become younger"),
    _never(stage.NumericsError, "the same numbers come out again; see the dump of the rows"),
    _never(stage.ContractError, "request, run record and artefacts don't fit together"),
    _never(stage.DataError, "the dataset must be changed"),
    _never(stage.RewardError, "the reward must be changed"),
    _never(stage.SpecFaultsError, "the job file must be changed"),
    _again(stage.StageError, 5, "the stage stopped for a reason that has no class of its own"),
    _again(store.TransientStorageError, 10, "the store may answer again"),
    _again(store.AlreadyPublishedError, 1, "another attempt has committed; its artefacts are taken"),
    _never(store.ObjectMissingError, "a committed object is gone"),
    _never(store.CorruptObjectError, "a committed object is damaged"),
    _never(store.SchemaVersionError, "the data was written by newer code"),
    _never(store.StoreAccessError, "somebody must give access, space or the bucket"),
    _never(store.InvalidInputError, "the data must not be stored"),
    _never(store.RunNotEmptyError, "another run lies there"),
    _never(store.PolicyVersionError, "policy versions don't go backwards"),
    _never(store.ResumeMismatchError, "the resume point belongs to another run"),
    _again(store.StorageError, 5, "the store failed for a reason that has no class of its own"),
    _never(planning.SpecError, "the cluster or job file must be changed"),
    _never(planning.InfeasibleError, "no placement exists on this cluster"),
    _never(planning.PlanMismatchError, "the plan belongs to another cluster or job"),
    _never(planning.SearchError, "the same search gives the same answer"),
    _never(planning.PlanningError, "the planner gives the same answer again"),
)
"""Class to decision, most specific first."""


def stage_retry_policy() -> ExceptionRetryPolicy:
    """Return the policy that every task of an iteration has."""
    return ExceptionRetryPolicy(rules=list(RULES))
