"""`transfer_gbps` of a link between regions reaches the stores behind it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from plans.errors import SpecError
from plans.spec.load import load_cluster
from stages.context import transfer_limit
from stages.runs import ResolvedRun, create_run, resolve_run
from storage.rate_limit import RateLimitedStore
from tests.helpers.stage_contexts import CLUSTER, JOB, make_context

LINK = "latency_ms: 10, bandwidth_gbps: 1"


def resolved(base: str, limit: str) -> ResolvedRun:
    text = CLUSTER.format(base=base).replace(LINK, f"{LINK}{limit}")
    return resolve_run(JOB, text, "r", 5, None, f"{base}/none")


def test_limit_is_of_the_link_between_the_machines_region_and_the_stores(tmp_path: Path) -> None:
    run = resolved(str(tmp_path), ", transfer_gbps: 0.5")
    far, own = run.roots["a"], run.roots["b"]
    assert transfer_limit(run, "b", far) == 0.5e9 / 8
    assert transfer_limit(run, "a", own) == 0.5e9 / 8
    assert transfer_limit(run, "b", own) is None
    assert transfer_limit(resolved(str(tmp_path), ""), "b", far) is None


@pytest.mark.parametrize(("limit", "is_limited"), [(", transfer_gbps: 0.5", True), ("", False)])
def test_stage_reads_the_other_region_through_the_limit(tmp_path: Path, limit: str, is_limited: bool) -> None:
    run = resolved(f"memory://limit-{tmp_path.name}", limit)
    create_run(run)
    context = make_context(run, tmp_path, "generate", 0, "b0")
    assert isinstance(context.home._store, RateLimitedStore) is is_limited  # type: ignore[attr-defined]
    assert not isinstance(context.store, RateLimitedStore)
    assert context.home.exists("r/run.json")


def test_plans_do_not_depend_on_it(tmp_path: Path) -> None:
    limited, free = (resolved(str(tmp_path), limit).cluster for limit in (", transfer_gbps: 0.5", ""))
    assert limited.fingerprint == free.fingerprint


def test_forbidden_link_has_no_limit() -> None:
    text = CLUSTER.format(base="x").replace(LINK, "forbidden: true, transfer_gbps: 1")
    with pytest.raises(SpecError, match="a forbidden link has neither latency_ms nor bandwidth_gbps nor transfer_gbps"):
        load_cluster(text, "cluster")
