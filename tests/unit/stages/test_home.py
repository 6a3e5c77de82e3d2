from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.home import EPOCH, STEP, MotleyHome, dag_id_of, iteration_of, logical_date_of


def test_home_named_by_environment_is_absolute(tmp_path: Path) -> None:
    home = MotleyHome.from_environment({"MOTLEY_HOME": str(tmp_path)})
    assert home.path == tmp_path
    assert home.run_entry_file("demo") == tmp_path / "runs" / "demo.json"
    assert home.state_dir("box") == tmp_path / "state" / "box"


def test_home_without_environment_is_in_the_users_home() -> None:
    assert MotleyHome.from_environment({}).path == Path.home() / ".motley"


def test_dag_id_has_the_runs_name() -> None:
    assert dag_id_of("demo") == "motley__demo"


def test_logical_date_of_iteration_three_is_three_minutes_after_the_epoch() -> None:
    assert logical_date_of(3) == datetime(2000, 1, 1, 0, 3, tzinfo=UTC)


@given(st.integers(min_value=0, max_value=13_000_000), st.integers(min_value=-12, max_value=12))
def test_iteration_of_is_the_inverse_in_every_time_zone(iteration: int, hours: int) -> None:
    date = logical_date_of(iteration).astimezone(timezone(timedelta(hours=hours)))
    assert iteration_of(date) == iteration


@pytest.mark.parametrize("date", [EPOCH + timedelta(seconds=1), EPOCH - STEP])
def test_iteration_of_a_date_between_iterations_is_refused(date: datetime) -> None:
    with pytest.raises(ValueError, match="belongs to no iteration"):
        iteration_of(date)


def test_iteration_of_a_run_without_logical_date_is_refused() -> None:
    with pytest.raises(ValueError, match="no logical date"):
        iteration_of(None)


def test_logical_date_of_a_negative_iteration_is_refused() -> None:
    with pytest.raises(ValueError, match="count from 0"):
        logical_date_of(-1)
