from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.app import exit_code_of, main
from cli.errors import DeploymentError, InputError
from plans.errors import PlanMismatchError, SpecError, TooFewGpusError
from stages.errors import EngineError, SpecFaultsError
from stages.runs import entry_of
from storage.errors import InvalidNameError, StoreFullError
from tests.helpers.stage_contexts import make_run

REPOSITORY = Path(__file__).parents[3]


def motley(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MOTLEY_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeploymentError("x"), 1),
        (InputError("x"), 2),
        (EngineError("x"), 1),
        (SpecFaultsError("job", ["x"]), 2),
        (StoreFullError("x"), 1),
        (InvalidNameError("x"), 2),
        (SpecError("job", []), 2),
        (PlanMismatchError("plan.json", "job", expected="a", found="b"), 2),
        (TooFewGpusError("x"), 1),
    ],
)
def test_exit_code_says_who_must_act(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


def test_help_lists_the_commands_of_every_group(tmp_path: Path) -> None:
    done = motley(tmp_path, "--help")
    assert done.returncode == 0
    for command in ("up", "down", "status", "run", "resume", "runs", "show", "verify"):
        assert f" {command} " in done.stdout


def test_status_of_a_home_without_deployment_is_one_json_document(tmp_path: Path) -> None:
    done = motley(tmp_path, "status", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "home": str(tmp_path),
        "state": "down",
        "url": None,
        "components": {},
        "runs": [],
        "faults": [],
        "stage_processes": 0,
    }


def test_down_without_deployment_is_harmless(tmp_path: Path) -> None:
    done = motley(tmp_path, "down", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"state": "down", "ended": 0})


def test_unreadable_run_entry_shows_in_the_status(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "bad.json").write_text("{")
    found = json.loads(motley(tmp_path, "status", "--json").stdout)
    assert found["runs"] == []
    assert "bad.json is unusable" in found["faults"][0]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe\x00", b"", b'{"format": "motley.run-entry/9"}'])
def test_run_that_can_not_be_read_hides_no_other(tmp_path: Path, content: bytes) -> None:
    run = make_run(tmp_path / "stores")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "bad.json").write_bytes(content)
    (tmp_path / "runs" / "r.json").write_text(entry_of(run).to_json())
    done = motley(tmp_path, "runs", "--json")
    assert done.returncode == 0, done.stderr
    bad, good = json.loads(done.stdout)["runs"]
    assert (bad["run"], good["run"], good["done"]) == ("bad", "r", 0)
    assert "bad.json is unusable" in bad["fault"]
    assert "fault" not in good
    assert [Path(root).name for root in good["roots"]] == ["a", "b"]


def test_run_whose_record_is_damaged_or_gone_says_so_in_the_list(tmp_path: Path) -> None:
    run = make_run(tmp_path / "stores")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "r.json").write_text(entry_of(run).to_json())
    record = Path(run.home_root) / "r" / "run.json"
    for damage, words in ((b'{"format": "motley', "is no complete JSON document"), (b"", "is no complete JSON")):
        record.write_bytes(damage)
        done = motley(tmp_path, "runs")
        assert done.returncode == 0
        assert words in done.stdout
    record.unlink()
    assert "has no run 'r'" in motley(tmp_path, "runs").stdout


def test_deployment_record_of_bytes_that_are_no_text_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "deployment.json").write_bytes(b"\xff\xfe")
    for command in ("status", "down"):
        done = motley(tmp_path, command)
        assert done.returncode == 1
        assert "can't be read as a deployment record" in done.stderr
        assert "Traceback" not in done.stderr


def test_home_of_a_user_that_there_is_not_is_bad_input(tmp_path: Path) -> None:
    done = motley(tmp_path, "status", "--home", "~no-such-user/x")
    assert done.returncode == 2
    assert done.stderr.startswith("The home directory ~no-such-user/x can't be found")


def test_run_of_a_file_whose_name_is_no_run_name_gets_one_that_is(tmp_path: Path) -> None:
    """The name comes from the job; that of its file matters to nobody."""
    source = REPOSITORY / "examples" / "quickstart"
    (tmp_path / "my job (2).yaml").write_text((source / "job.yaml").read_text().replace("seed: 0", "seed: -1"))
    done = motley(
        tmp_path / "home", "run", "--job", str(tmp_path / "my job (2).yaml"), "--cluster", str(source / "cluster.yaml")
    )
    assert done.returncode == 2
    assert "has 1 fault(s)" in done.stderr


def test_run_with_wrong_files_lists_every_fault_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("format: motley.job/1\nname: x\nbatch: {prompts: 0}\n")
    (tmp_path / "cluster.yaml").write_text("format: motley.cluster/1\nname: c\nmachines: []\n")
    home = tmp_path / "home"
    done = motley(home, "run", "--job", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "job.yaml" in done.stderr
    assert "cluster.yaml" in done.stderr
    assert not home.exists()


def test_run_with_a_name_that_exists_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo.json").touch()
    files = [str(REPOSITORY / "examples" / "quickstart" / name) for name in ("job.yaml", "cluster.yaml")]
    done = motley(tmp_path, "run", "--job", files[0], "--cluster", files[1], "--name", "demo")
    assert done.returncode == 2
    assert done.stderr.startswith("There is a run 'demo' in ")
    assert "`motley resume demo`" in done.stderr


def test_resume_of_an_unknown_run_is_bad_input(tmp_path: Path) -> None:
    done = motley(tmp_path, "resume", "nobody")
    assert done.returncode == 2
    assert done.stderr.startswith("There is no run 'nobody'")


def test_missing_option_is_bad_input(tmp_path: Path) -> None:
    done = motley(tmp_path, "run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Missing option '--job' / '-j'; see `motley run --help`.\n"


def test_wrong_number_is_bad_input(tmp_path: Path) -> None:
    done = motley(tmp_path, "up", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("Invalid value for '--port': ")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device (errno 28); free some space, or set MOTLEY_HOME to another disk."),
        (errno.EACCES, "Permission denied (errno 13); choose a path that you may write"),
        (errno.EROFS, "choose a path that can be written (MOTLEY_HOME is the deployment's)."),
        (errno.EIO, "mend that and try again."),
    ],
)
def test_error_of_the_system_that_no_command_foresaw_is_a_sentence(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/home/x/runs/.demo.json")

    monkeypatch.setattr("cli.deployment.read_record", fail)
    monkeypatch.setattr(sys, "argv", ["motley", "status", "--home", "/home/x"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (1, "")
    assert printed.err.startswith("/home/x/runs/.demo.json: ")
    assert words in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("command", [["run"], ["up"]])
def test_home_that_is_no_directory_is_a_sentence(tmp_path: Path, command: list[str]) -> None:
    """Also for root, whom permissions don't stop."""
    (tmp_path / "file").touch()
    files = [str(REPOSITORY / "examples" / "quickstart" / name) for name in ("job.yaml", "cluster.yaml")]
    options = ["--job", files[0], "--cluster", files[1]] if command == ["run"] else []
    done = motley(tmp_path / "file" / "home", *command, *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert "set MOTLEY_HOME to a directory that you may write" in done.stderr
    assert "Traceback" not in done.stderr
