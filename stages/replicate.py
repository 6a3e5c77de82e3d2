"""Stage replicate: an iteration's rollouts and column families of all regions are copied into this region's store.

No iteration needs it: training reads each shard where it was made. It is run where somebody wants all rows in one
place (a data team, a region that is about to go), by hand: ``python -m stages replicate --request FILE``.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from pydantic import JsonValue

from stages.context import StageContext, StageOutcome
from stages.rollout_shards import region_stores
from storage.layout import Split
from storage.replication import Replicated, replicate_iteration
from storage.transfer import Link


def run_stage(context: StageContext) -> StageOutcome:
    """Copy what is missing here; a repeated call goes on where the one before was cut."""
    work = context.state_dir / "work" / context.run.name / f"replicate-{context.iteration}"
    done = [_replicate(context, split, work) for split in Split]
    shutil.rmtree(work, ignore_errors=True)
    manifests = [manifest for one in done for manifest in one.manifests]
    metrics: dict[str, JsonValue] = {
        "artefacts": len(manifests),
        "copied": sum(one.num_copied for one in done),
        "bytes": sum(one.num_bytes for one in done),
    }
    return StageOutcome(
        reused=not metrics["copied"], artefacts=tuple(manifest.key for manifest in manifests), metrics=metrics
    )


def _replicate(context: StageContext, split: Split, work: Path) -> Replicated:
    others = [store for store in region_stores(context) if store is not context.store]
    ends_at = time.monotonic() + context.deadline.remaining_s(f"replication of iteration {context.iteration}")
    with context.phase(f"copy_{split.value}"):
        return replicate_iteration(
            others,
            context.store,
            context.run.name,
            context.iteration,
            work,
            created_by=context.created_by,
            split=split,
            attempt=context.request.attempt,
            link=Link(ends_at=ends_at),
        )
