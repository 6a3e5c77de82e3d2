"""Plans written by hand: what is refused, and that iteration 0 follows one that a run was started with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.errors import InputError
from cli.plan_by_hand import commit_plan, plan_by_hand
from plans.errors import PlanMismatchError, SpecError
from plans.plan_load import load_plan
from stages.context import StageContext
from stages.contract import StageRequest
from stages.plan import ensure_plan
from stages.runs import ResolvedRun, create_run, resolve_run
from stages.timing import Clock, Deadline, PhaseTimer

EXAMPLE = Path(__file__).parents[3] / "examples" / "two-regions"


@pytest.fixture
def run(tmp_path: Path) -> ResolvedRun:
    cluster = (EXAMPLE / "cluster.yaml").read_text()
    for name in ("west", "east"):
        cluster = cluster.replace(f"s3://rl-{name}/runs", str(tmp_path / name))
    made = resolve_run((EXAMPLE / "job.yaml").read_text(), cluster, "r", None, None, str(tmp_path / "none"))
    create_run(made)
    return made


@pytest.fixture
def file(run: ResolvedRun, tmp_path: Path) -> Callable[..., Path]:
    """Write the example's plan with fields replaced."""

    def write(**changes: Any) -> Path:
        plan = load_plan((EXAMPLE / "plan.yaml").read_text(), "plan.yaml")
        path = tmp_path / "plan.json"
        path.write_text(plan.model_copy(update={"cluster": run.cluster.fingerprint, **changes}).to_json())
        return path

    return write


def test_first_iteration_follows_the_plan_that_the_run_was_started_with(
    run: ResolvedRun, file: Callable[..., Path], tmp_path: Path
) -> None:
    plan = plan_by_hand(file(method="somebody's"), run)
    assert commit_plan(run, plan, 0, "motley run --plan") == 0
    for k in range(2):
        request = StageRequest.model_validate(
            {
                "stage": "plan", "run": run.name, "iteration": k, "root": run.home_root, "machine": "west-0",
                "state_dir": str(tmp_path / "state"), "attempt": "a1", "params": {},
            }
        )  # fmt: skip
        clock = Clock()
        context = StageContext(
            request, run, PhaseTimer(clock=clock), Deadline(clock=clock, ends_at=clock.monotonic() + 600)
        )
        entry, is_new = ensure_plan(context)
        assert (entry.number, is_new, entry.plan.fingerprint) == (0, False, plan.fingerprint)
        facts = entry.plan.search.model_extra or {}
        assert (entry.plan.method, facts["adopted_because"]) == ("by-hand", "by hand (motley run --plan)")
    assert commit_plan(run, plan, 2, "motley replan") == 1


def test_plan_of_another_cluster_is_refused(run: ResolvedRun, file: Callable[..., Path]) -> None:
    with pytest.raises(PlanMismatchError, match=r"plan\.json.*cluster"):
        plan_by_hand(file(cluster="0" * 64), run)


def test_plan_that_breaks_a_rule_is_refused(run: ResolvedRun, file: Callable[..., Path]) -> None:
    plan = load_plan((EXAMPLE / "plan.yaml").read_text(), "plan.yaml")
    tasks = {task: placed for task, placed in plan.tasks.items() if task.value != "actor_training"}
    with pytest.raises(SpecError, match="actor_training"):
        plan_by_hand(file(tasks=tasks), run)


def test_plan_with_a_drained_machine_is_refused(run: ResolvedRun, file: Callable[..., Path]) -> None:
    fields = {name: getattr(run, name) for name in ResolvedRun.__slots__}
    drained = ResolvedRun(**{**fields, "drained": ("east-0",)})
    with pytest.raises(InputError, match=r"plan\.json asks for what can't be done: machine east-0 is drained\."):
        plan_by_hand(file(), drained)
