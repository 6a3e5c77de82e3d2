from __future__ import annotations

from pathlib import Path

import pytest

from stages.errors import ContractError
from stages.run_entry import MachineEntry, RunEntry, list_run_entries, read_run_entry

BOX = MachineEntry(name="box", queue="gpu", region="local")


def entry(**changes: object) -> RunEntry:
    return RunEntry.model_validate(
        {"run": "demo", "roots": {"local": "file:///data"}, "machines": (BOX,), "iterations": 10} | changes
    )


def test_entry_written_and_read_is_equal(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    file.write_text(entry(evaluate_every=3).to_json())
    assert read_run_entry(file) == entry(evaluate_every=3)
    assert list_run_entries(tmp_path) == [file]


def test_entry_file_that_is_missing_or_wrong_is_refused_with_every_field(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="can't be read"):
        read_run_entry(tmp_path / "none.json")
    file = tmp_path / "bad.json"
    file.write_text('{"run": "../up", "roots": {}, "machines": [], "iterations": 0}')
    with pytest.raises(ContractError, match=r"run: .*machines: .*iterations: "):
        read_run_entry(file)


def test_entry_without_a_root_for_a_machines_region_is_refused() -> None:
    with pytest.raises(ValueError, match=r"roots lack the region\(s\) \['local'\]"):
        entry(roots={"other": "file:///data"})


def test_entry_with_two_machines_on_one_queue_is_refused() -> None:
    with pytest.raises(ValueError, match="machines share a queue"):
        entry(machines=(BOX, MachineEntry(name="box2", queue="gpu", region="local")))


@pytest.mark.parametrize(
    ("every", "due"),
    [(0, [9]), (4, [3, 7, 9]), (1, list(range(10)))],
)
def test_evaluation_is_due_every_nth_and_last(every: int, due: list[int]) -> None:
    run = entry(evaluate_every=every)
    assert [k for k in range(10) if run.is_evaluation_due(k)] == due


@pytest.mark.parametrize(("every", "due"), [(0, [0]), (4, [0, 4, 8])])
def test_profile_is_due_first_and_every_nth(every: int, due: list[int]) -> None:
    run = entry(profile_every=every)
    assert [k for k in range(10) if run.is_profile_due(k)] == due
