"""Errors go from process to process whole: what a pool's child raises is read in its parent."""

from __future__ import annotations

import pickle

import pytest

from stages import errors
from stages.errors import SpecFaultsError, StageError

PLAIN = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, StageError) and kind is not SpecFaultsError
]


@pytest.mark.parametrize("kind", PLAIN)
def test_error_is_read_back_with_message_and_facts(kind: type[StageError]) -> None:
    error = kind("what, where and why", run="r", iteration=3)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_faults_of_a_job_are_read_back_one_by_one() -> None:
    error = SpecFaultsError("job.yaml", ["a is 1", "b is 2"])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.faults) == (SpecFaultsError, str(error), error.faults)
