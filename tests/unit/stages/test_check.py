from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.__main__ import main
from stages.check import Findings, _check_disk, check_files
from stages.runs import resolve_run

EXAMPLE = Path(__file__).parents[3] / "tests" / "helpers" / "addition"


def test_missing_files_are_named_together(tmp_path: Path) -> None:
    findings = check_files(tmp_path / "job.yaml", None)

    assert len(findings.faults) == 2
    assert findings.faults[0].startswith(f"job file {tmp_path}/job.yaml can't be read")
    assert findings.faults[1] == "no cluster file is given; add --cluster FILE."


def test_faults_of_files_end_the_check_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text((EXAMPLE / "job.yaml").read_text().replace("seed: 0", "seed: -1"))
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text((EXAMPLE / "cluster.yaml").read_text().replace("gpu: cpu", "gpu: A100-81"))

    code = main(["check", "--job", str(job), "--cluster", str(cluster), "--json"])

    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (code, document["format"], document["ok"]) == (2, "motley.check/1", False)
    assert [fault.split(" ")[1] for fault in document["faults"]] == ["seed", "machines[0].gpu"]
    assert printed.err.startswith("The job can't be started: 2 fault(s).\n")


def test_disk_of_the_store_that_is_used_when_no_file_names_one_must_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    run = resolve_run(
        (EXAMPLE / "job.yaml").read_text(), (EXAMPLE / "cluster.yaml").read_text(), "r", None, None,
        str(tmp_path / "not" / "yet"),
    )  # fmt: skip
    findings = Findings()
    _check_disk(findings, run)
    assert asked == [tmp_path]
    assert findings.faults[0].startswith(f"{tmp_path} has 0.0 MB free, but 6 policy versions")
