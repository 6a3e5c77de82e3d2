"""Laws of the simulator over random small clusters, lengths and staleness bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plans.simulate import SimulationSettings, simulate
from plans.simulate.pipeline import one_forward_one_backward
from tests.unit.plans.simulate.builders import cluster_of, job_of, one_gpu_each


@settings(deadline=None)
@given(stages=st.integers(1, 6), batches=st.integers(1, 9))
def test_every_micro_batch_goes_forward_then_backward_once_on_every_stage(stages: int, batches: int) -> None:
    for stage in range(stages):
        order = one_forward_one_backward(stage, stages, batches)
        forward = [step.micro_batch for step in order if not step.is_backward]
        backward = [step.micro_batch for step in order if step.is_backward]
        position = {step: index for index, step in enumerate(order)}
        assert forward == backward == list(range(batches))
        assert all(
            position[step] < position[type(step)(step.micro_batch, is_backward=True)]
            for step in order
            if not step.is_backward
        )


@settings(max_examples=30, deadline=None)
@given(
    staleness=st.integers(1, 3),
    response=st.integers(1, 300),
    iterations=st.integers(1, 6),
    seed=st.integers(0, 5),
    bandwidth=st.sampled_from([0.01, 1.0, 100.0]),
)
def test_asynchronous_simulation_ends_with_every_sample_trained_once_within_the_bound(
    staleness: int, response: int, iterations: int, seed: int, bandwidth: float
) -> None:
    cluster = cluster_of(2, bandwidth_gbps=bandwidth)
    job = job_of(mode="async", staleness=staleness, response=response)
    lengths = (1, max(1, response // 2), response)
    result = simulate(
        cluster,
        job,
        one_gpu_each(cluster, job, "m0/0", "m1/0"),
        SimulationSettings(iterations=iterations, seed=seed, lengths=lengths),
    )
    assert len(result.iteration_s) == iterations
    assert sum(result.staleness.values()) == iterations * job.num_samples
    assert all(0 <= lag <= staleness for lag in result.staleness)
    assert all(0 < share <= 1 for share in result.utilisation.values())
