"""What the pool asks of an engine: the job's settings, and where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from plans.workflow import RlTask
from stages.sharding import local_replicas
from tests.helpers.stage_contexts import make_context, make_run


@pytest.mark.parametrize(
    ("dtype_on", "expected"),
    [
        ("{}", {"a0": "fp32", "b0": "fp32"}),
        ("{b0: bf16}", {"a0": "fp32", "b0": "bf16"}),
        ("{cpu: bf16}", {"a0": "bf16", "b0": "bf16"}),
        ("{cpu: bf16, a0: fp32}", {"a0": "fp32", "b0": "bf16"}),
    ],
)
def test_compute_type_is_that_of_the_machine_then_of_its_gpu_type_then_of_the_job(
    tmp_path: Path, dtype_on: str, expected: dict[str, str]
) -> None:
    run = make_run(tmp_path, changes={"dtype: fp32": f"dtype: fp32, dtype_on: {dtype_on}"})
    found = {}
    for machine in expected:
        context = make_context(run, tmp_path, "infer", 0, machine)
        replica = local_replicas(context.plan.tasks[RlTask.REFERENCE_INFERENCE], machine)[0]
        found[machine] = context.engines._inference_launch("scoring", RlTask.REFERENCE_INFERENCE, replica).dtype
    assert found == expected
    sampling = make_context(run, tmp_path, "generate", 0)  # the plan samples on the first machine alone
    assert sampling.engines._generation_launch(0).dtype == expected["a0"]
