from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from cli import run_register
from cli.deployment_api import AirflowApi
from cli.deployment_settings import START_TIMEOUT_VARIABLE
from cli.errors import CommandError, DeploymentError, InputError
from cli.run_outcome import outcome_text
from cli.run_register import default_name, entry_from_store, entry_of, preflight, register, wait_for_dag
from stages.check import CHECK_HEADLINE
from stages.check_notice import NOTICE
from stages.home import MotleyHome
from stages.run_entry import MachineEntry, RunEntry, read_run_entry
from stages.runs import create_run, resolve_run
from tests.helpers.airflow_server import AirflowServer

REPOSITORY = Path(__file__).parents[3]
ADDITION = REPOSITORY / "tests" / "helpers" / "addition"


def quickstart_entry(root: Path) -> RunEntry:
    job, cluster = (ADDITION / "job.yaml").read_text(), (ADDITION / "cluster.yaml").read_text()
    resolved = resolve_run(job, cluster, "demo", 4, 1, str(root))
    create_run(resolved)
    return entry_of(resolved)


def executable(file: Path, script: str) -> str:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("quickstart", "quickstart-20260102-030405"),
        ("Qwen/3 8B: PPO", "Qwen-3-8B-PPO-20260102-030405"),
        ("???", "run-20260102-030405"),
    ],
)
def test_default_name_is_fit_for_keys_and_dag_ids(job: str, expected: str) -> None:
    assert default_name(job, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == expected


def test_entry_repeats_what_the_dag_needs(tmp_path: Path) -> None:
    assert quickstart_entry(tmp_path) == RunEntry(
        run="demo",
        roots={"local": str(tmp_path)},
        machines=(MachineEntry(name="local", queue="local", region="local"),),
        iterations=4,
        max_staleness=0,
        evaluate_every=10,
    )


def test_entry_is_found_again_from_the_run_record(tmp_path: Path) -> None:
    assert quickstart_entry(tmp_path) == entry_from_store(str(tmp_path), "demo")


def test_registered_entry_is_what_the_dag_factory_reads(tmp_path: Path) -> None:
    home, entry = MotleyHome(tmp_path / "home"), quickstart_entry(tmp_path / "store")
    register(entry, home)
    register(entry, home)
    assert read_run_entry(home.run_entry_file("demo")) == entry
    assert [file.name for file in home.runs_dir.iterdir()] == ["demo.json"]


def test_preflight_passes_on_what_it_found(tmp_path: Path) -> None:
    lines: list[str] = []
    python = executable(tmp_path / "python", 'echo "args: $*"')
    preflight(python, Path("/j.yaml"), Path("/c.yaml"), Path("/cache"), lines.append, root=Path("/root"))
    assert lines == ["args: -m stages check --job /j.yaml --cluster /c.yaml --cache /cache --root /root"]


def test_preflight_tells_what_takes_long_while_it_does(tmp_path: Path) -> None:
    lines: list[str] = []
    go = tmp_path / "go"
    script = f"echo '{NOTICE}compiling, about 1.5 minutes' >&2; while [ ! -e {go} ]; do sleep 0.02; done; echo plan: x"
    python = executable(tmp_path / "python", script)

    def report(line: str) -> None:
        lines.append(line)
        go.touch()  # the check goes on only because the notice came before its end

    preflight(python, Path("/j"), Path("/c"), Path("/cache"), report, root=Path("/root"))
    assert lines == ["compiling, about 1.5 minutes", "plan: x"]


def test_preflight_that_does_not_end_is_killed_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_register, "PREFLIGHT_TIMEOUT_S", 0.2)
    python = executable(tmp_path / "python", "exec sleep 60")
    with pytest.raises(CommandError, match="did not end within"):
        preflight(python, Path("j"), Path("c"), Path("cache"), lambda _: None, root=Path("root"))


@pytest.mark.parametrize(("code", "kind"), [(2, InputError), (1, CommandError)])
def test_preflight_faults_keep_their_words_and_exit_code(tmp_path: Path, code: int, kind: type[CommandError]) -> None:
    python = executable(tmp_path / "python", f"echo 'The job has 1 fault.' >&2; exit {code}")
    with pytest.raises(kind, match=r"The job has 1 fault\.") as caught:
        preflight(python, Path("j"), Path("c"), Path("cache"), lambda _: None, root=Path("root"))
    assert caught.value.exit_code == code


def test_preflight_faults_come_without_what_libraries_wrote_before_them(tmp_path: Path) -> None:
    python = executable(tmp_path / "python", f"echo 'Warning: x' >&2; echo \"{CHECK_HEADLINE}1 fault(s).\" >&2; exit 2")
    with pytest.raises(InputError) as caught:
        preflight(python, Path("j"), Path("c"), Path("cache"), lambda _: None, root=Path("root"))
    assert str(caught.value) == f"{CHECK_HEADLINE}1 fault(s)."


def test_preflight_does_not_see_modules_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward function found in the user's folder would pass the check and be missing in the stages."""
    lines: list[str] = []
    monkeypatch.chdir(tmp_path)
    python = executable(tmp_path / "python", "pwd")
    preflight(python, Path("/j"), Path("/c"), Path("/cache"), lines.append, root=Path("/root"))
    assert lines == ["/"]


def test_dag_is_waited_for_with_its_number_of_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = AirflowServer("motley__demo", summary="4 iterations")
    api = AirflowApi("http://127.0.0.1:1", transport=server.transport())
    monkeypatch.setattr(run_register, "DAG_FILE", tmp_path / "missing.py")
    entry = quickstart_entry(tmp_path)
    wait_for_dag(api, entry)
    assert server.requests == [("GET", "/api/v2/dags/motley__demo")]


def test_dag_that_does_not_appear_is_a_sentence_with_airflows_import_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = AirflowServer("motley__demo", summary="3 iterations")
    api = AirflowApi("http://127.0.0.1:1", transport=server.transport())
    monkeypatch.setattr(run_register, "DAG_FILE", tmp_path / "missing.py")
    monkeypatch.delenv(START_TIMEOUT_VARIABLE, raising=False)
    monkeypatch.setattr(run_register, "DAG_TIMEOUT_S", 1e-9)
    with pytest.raises(DeploymentError, match=r"does not show DAG motley__demo .*its import error is: KeyError: 'x'"):
        wait_for_dag(api, quickstart_entry(tmp_path))


def test_outcome_text_has_scores_rollouts_and_the_next_commands() -> None:
    outcome = {
        "run": "demo",
        "state": "finished",
        "iterations": 4,
        "policy_version": 4,
        "reward_first": 0.25,
        "reward_last": 0.5,
        "eval_reward_before": 0.2,
        "eval_reward_after": 0.6,
        "rollouts": "file:///data/demo/iterations",
        "url": "http://127.0.0.1:8080",
    }
    assert outcome_text(outcome).splitlines() == [
        "Run demo: finished, policy version 4 of 4.",
        "  held-out score   0.200 -> 0.600 (before -> after)",
        "  training reward  0.250 -> 0.500 (first -> last iteration)",
        "  rollouts         file:///data/demo/iterations",
        "                   motley rollouts stats demo   |   motley show demo",
        "  Airflow          http://127.0.0.1:8080",
    ]
