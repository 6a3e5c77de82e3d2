from __future__ import annotations

import pytest

pytest.importorskip("airflow.sdk")

from plugins.assets import iteration_of_partition, partition_of, rollouts_asset
from stages.errors import ContractError


@pytest.mark.parametrize(("iteration", "key"), [(0, "iter-000000"), (12, "iter-000012"), (1234567, "iter-1234567")])
def test_partition_keys_name_iterations_and_back(iteration: int, key: str) -> None:
    assert partition_of(iteration) == key
    assert iteration_of_partition(key) == iteration


@pytest.mark.parametrize("key", [None, "", "iter-12", "iter-00000x", "2000-01-01", "iter-000012\n"])
def test_other_keys_are_refused_with_an_example(key: str | None) -> None:
    with pytest.raises(ContractError, match="iter-000012"):
        iteration_of_partition(key)


def test_runs_have_assets_of_their_own() -> None:
    first, second = rollouts_asset("a"), rollouts_asset("b")
    assert (first.name, first.uri) == ("motley.a.rollouts", "motley://a/rollouts")
    assert first.name != second.name
    assert first.uri != second.uri
