from __future__ import annotations

import pytest

pytest.importorskip("airflow.sdk")

import pendulum
from airflow.timetables.base import DataInterval, TimeRestriction
from airflow.utils.types import DagRunType
from hypothesis import given
from hypothesis import strategies as st

from plugins.timetable import IterationTimetable
from stages.home import EPOCH, STEP, iteration_of, logical_date_of

FROM_EPOCH = TimeRestriction(earliest=pendulum.instance(EPOCH), latest=None, catchup=True)


def interval(iteration: int) -> DataInterval:
    start = pendulum.instance(logical_date_of(iteration))
    return DataInterval(start=start, end=start + STEP)


def iterations_of(timetable: IterationTimetable, restriction: TimeRestriction = FROM_EPOCH) -> list[int]:
    found, last = [], None
    while (info := timetable.next_dagrun_info(last_automated_data_interval=last, restriction=restriction)) is not None:
        found.append(iteration_of(info.logical_date))
        last = info.data_interval
    return found


@given(st.integers(min_value=1, max_value=60))
def test_timetable_gives_every_iteration_once_in_order_and_ends(total: int) -> None:
    assert iterations_of(IterationTimetable("demo", total)) == list(range(total))


@given(st.integers(min_value=0, max_value=10_000), st.integers(min_value=1, max_value=10_000))
def test_timetable_is_total_and_monotone(last: int, total: int) -> None:
    info = IterationTimetable("demo", total).next_dagrun_info(
        last_automated_data_interval=interval(last), restriction=FROM_EPOCH
    )
    assert (None if info is None else iteration_of(info.logical_date)) == (last + 1 if last + 1 < total else None)


@given(st.integers(min_value=1, max_value=10_000), st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True))
def test_timetable_serialised_and_back_behaves_the_same(total: int, run: str) -> None:
    timetable = IterationTimetable(run, total)
    again = IterationTimetable.deserialize(timetable.serialize())
    assert (again.serialize(), again.summary) == (timetable.serialize(), timetable.summary)


def test_timetable_after_its_total_was_raised_goes_on_after_the_last_iteration() -> None:
    info = IterationTimetable("demo", 9).next_dagrun_info(
        last_automated_data_interval=interval(5), restriction=FROM_EPOCH
    )
    assert info is not None
    assert iteration_of(info.logical_date) == 6


def test_timetable_with_a_later_start_date_begins_there() -> None:
    start = pendulum.instance(EPOCH).add(seconds=90)
    assert iterations_of(IterationTimetable("demo", 4), TimeRestriction(start, None, True)) == [2, 3]


@given(st.integers(min_value=0, max_value=30), st.integers(min_value=0, max_value=30))
def test_timetable_of_a_backfill_stays_inside_its_range_both_ends_included(first: int, length: int) -> None:
    earliest, latest = (pendulum.instance(logical_date_of(k)) for k in (first, first + length))
    found = iterations_of(IterationTimetable("demo", 1000), TimeRestriction(earliest, latest, True))
    assert found == list(range(first, first + length + 1))


def test_timetable_with_a_date_off_the_grid_goes_on_instead_of_raising() -> None:
    start = pendulum.instance(EPOCH).add(seconds=90)
    info = IterationTimetable("demo", 9).next_dagrun_info(
        last_automated_data_interval=DataInterval(start, start + STEP), restriction=FROM_EPOCH
    )
    assert info is not None
    assert iteration_of(info.logical_date) == 2


def test_run_id_names_run_and_iteration() -> None:
    run_id = IterationTimetable("demo", 9).generate_run_id(
        run_type=DagRunType.SCHEDULED, run_after=pendulum.instance(EPOCH), data_interval=interval(3)
    )
    assert run_id == "scheduled__demo.iter-000003"


def test_run_id_without_interval_is_airflows_own() -> None:
    run_id = IterationTimetable("demo", 9).generate_run_id(
        run_type=DagRunType.MANUAL, run_after=pendulum.instance(EPOCH), data_interval=None
    )
    assert run_id == "manual__2000-01-01T00:00:00+00:00"


def test_timetable_is_periodic_so_that_backfills_are_accepted() -> None:
    """A2, A3, A5: iterations are backfilled by date; Airflow refuses a timetable that is not periodic."""
    assert (IterationTimetable.periodic, IterationTimetable.partitioned) == (True, False)


def test_manual_interval_is_that_of_the_iteration_before_a_date() -> None:
    found = IterationTimetable("demo", 9).infer_manual_data_interval(
        run_after=pendulum.instance(EPOCH).add(seconds=150)
    )
    assert found == interval(2)
