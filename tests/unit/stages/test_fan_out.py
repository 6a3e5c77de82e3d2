"""The plan says how machines of a region read new weights, and they do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plans.errors import SpecError
from plans.plan import FanOut, Plan, plan_faults
from plans.spec.load import load_cluster
from stages import fan_out
from stages.planning import choose_plan
from stages.policy_files import policy_directory
from storage.reading_turns import ReadingTurns
from tests.helpers.stage_contexts import make_context, make_run, publish
from tests.unit.stages.test_planning import job

CLUSTER = """
format: motley.cluster/1
name: c
machines:
  - {name: a0, region: a, gpu: A100-80, count: 8, intra_gb_s: 300}
  - {name: b0, region: b, gpu: L4, count: 1}
  - {name: b1, region: b, gpu: L4, count: 1}
links:
  same_zone: {latency_ms: 0.1, bandwidth_gbps: 10}
  regions: [{between: [a, b], latency_ms: 10, bandwidth_gbps: 5}]
  RATES
"""


def test_region_with_a_known_store_gets_a_fan_out_in_the_plan() -> None:
    plain, rated = (load_cluster(CLUSTER.replace("RATES", rates), "c") for rates in ("", "stores_gbps: {a: 10, b: 10}"))
    found = choose_plan(rated, job(), profiles={}, seed=0)
    machines = {gpu.rpartition("/")[0] for gpu in next(iter(found.tasks.values())).gpus}
    several = {region for region in ("a", "b") if sum(name[0] == region for name in machines) > 1}
    assert set(found.fan_out) == several
    assert choose_plan(plain, job(), profiles={}, seed=0).fan_out == {}
    assert plain.fingerprint == rated.fingerprint  # placements do not depend on it
    assert Plan.model_validate(found.to_document()).fan_out == found.fan_out


def test_rate_of_a_store_of_no_region_is_refused() -> None:
    with pytest.raises(SpecError, match=r"a store's region is one of a, b"):
        load_cluster(CLUSTER.replace("RATES", "stores_gbps: {x: 1}"), "c")
    with pytest.raises(SpecError, match="the rate of b must be above 0"):
        load_cluster(CLUSTER.replace("RATES", "stores_gbps: {b: 0}"), "c")


def test_plan_that_names_machines_of_another_region_is_refused() -> None:
    cluster, chosen = load_cluster(CLUSTER.replace("RATES", ""), "c"), job()
    plan = choose_plan(cluster, chosen, profiles={}, seed=0)
    for order in (("b0", "a0"), ("b0", "b0")):
        wrong = plan.model_copy(update={"fan_out": {"b": FanOut(order=order, at_once=1)}})
        (fault,) = plan_faults(wrong, cluster, chosen.planner)
        assert fault.field == "fan_out.b.order"


@pytest.mark.parametrize(
    ("given", "num_turns"),
    [
        ({}, 0),
        ({"b": FanOut(order=("b0", "b1"), at_once=2)}, 0),
        ({"b": FanOut(order=("b1", "b0"), at_once=1, read_s=20.0)}, 1),
        ({"b": FanOut(order=("b1",), at_once=1)}, 0),
        ({"a": FanOut(order=("a0", "a1"), at_once=1)}, 0),
    ],
)
def test_machine_takes_its_turn_once_per_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, FanOut], num_turns: int
) -> None:
    run = make_run(tmp_path)
    publish(make_context(run, tmp_path, "commit_policy", 0), 0, is_head=True)
    context = make_context(run, tmp_path, "generate", 0, "b0")
    monkeypatch.setattr(type(context), "plan", context.plan.model_copy(update={"fan_out": given}))
    monkeypatch.setattr("stages.policy_files._in_place", lambda *_: None)  # as if no store were on this machine
    taken = list[ReadingTurns]()

    class Watched(ReadingTurns):
        def turn(self, *arguments: Any) -> Any:
            taken.append(self)
            return super().turn(*arguments)

    monkeypatch.setattr(fan_out, "ReadingTurns", Watched)
    policy = publish(make_context(run, tmp_path, "commit_policy", 0), 1, is_head=True)
    for _ in range(2):
        folder = policy_directory(context, policy)
        assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json"}
    assert len(taken) == num_turns
    assert all((t.order, t.at_once, t.reading_counts_s) == (("b1", "b0"), 1, 80.0) for t in taken)
    assert not list(context.store.list("r/readers"))
