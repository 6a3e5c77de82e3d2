from __future__ import annotations

import pytest

pytest.importorskip("airflow.sdk")

from plans.errors import SpecError
from plugins.stage_failures import error_of
from stages.__main__ import Terminated, failure_of
from stages.contract import StageFailure
from stages.errors import EngineError, EngineUnavailableError, SpecFaultsError, StageError
from storage.errors import CorruptObjectError


@pytest.mark.parametrize(
    "error",
    [
        EngineError("out of memory", rank=1),
        SpecFaultsError("job.yaml", ["batch.prompts is 0", "seed is missing"]),
        CorruptObjectError("digest differs", key="demo/policies/1"),
        SpecError("job.yaml", []),
    ],
)
def test_error_recorded_and_rebuilt_has_class_message_and_attributes(error: Exception) -> None:
    rebuilt = error_of(failure_of(error))
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)


def test_rebuilt_error_has_the_facts_as_attributes() -> None:
    rebuilt = error_of(failure_of(EngineError("out of memory", rank=1)))
    assert isinstance(rebuilt, EngineError)
    assert rebuilt.attributes == {"rank": 1}


def test_stage_ended_from_outside_becomes_a_retryable_error() -> None:
    assert type(error_of(failure_of(Terminated("ended by SIGTERM")))) is EngineUnavailableError


def test_foreign_class_is_never_imported() -> None:
    failure = StageFailure(type="os.system", message="boom", is_retryable=False)
    rebuilt = error_of(failure)
    assert type(rebuilt) is StageError
    assert str(rebuilt) == "os.system: boom"
