from __future__ import annotations

import inspect
from types import ModuleType

import pytest

pytest.importorskip("airflow.sdk")

from airflow.sdk import ExceptionRetryPolicy, RetryAction

from plans import errors as planning
from plugins.retry_policies import RULES, stage_retry_policy
from stages import errors as stage
from storage import errors as store

ROOTS = (stage.StageError, store.StorageError, planning.PlanningError)


def error_classes(module: ModuleType) -> list[type[Exception]]:
    return [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and issubclass(kind, ROOTS)
    ]


def instance(kind: type[Exception]) -> Exception:
    return kind.__new__(kind)


@pytest.mark.parametrize("kind", [k for module in (stage, store, planning) for k in error_classes(module)])
def test_every_public_error_class_has_a_rule_of_its_own_branch(kind: type[Exception]) -> None:
    rule = next(rule for rule in RULES if rule.matches(instance(kind)))
    named = rule._resolve_exception_classes()[0]
    assert issubclass(kind, named)
    assert named not in ROOTS or kind in ROOTS


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        (stage.EngineUnavailableError, RetryAction.RETRY),
        (stage.EngineError, RetryAction.RETRY),
        (stage.DeadlineError, RetryAction.RETRY),
        (stage.NumericsError, RetryAction.FAIL),
        (stage.SpecFaultsError, RetryAction.FAIL),
        (stage.StaleRolloutError, RetryAction.FAIL),
        (store.TransientStorageError, RetryAction.RETRY),
        (store.CredentialsError, RetryAction.FAIL),
        (store.DuplicateRowError, RetryAction.FAIL),
        (planning.MemoryInfeasibleError, RetryAction.FAIL),
        (ZeroDivisionError, RetryAction.DEFAULT),
    ],
)
def test_policy_decides_by_class(kind: type[Exception], action: RetryAction) -> None:
    assert stage_retry_policy().evaluate(instance(kind), 1, 4).action is action


def test_no_rule_is_hidden_by_a_wider_one_before_it() -> None:
    classes = [rule._resolve_exception_classes()[0] for rule in RULES]
    hidden = [
        (earlier.__name__, later.__name__)
        for index, later in enumerate(classes)
        for earlier in classes[:index]
        if issubclass(later, earlier)
    ]
    assert hidden == []


def test_policy_survives_serialisation() -> None:
    policy = stage_retry_policy()
    assert ExceptionRetryPolicy.deserialize(policy.serialize()).serialize() == policy.serialize()
