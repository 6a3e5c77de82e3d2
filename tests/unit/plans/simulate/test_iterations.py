from __future__ import annotations

import dataclasses
import itertools

import pytest

from plans.errors import PlanMismatchError, SpecError
from plans.simulate import Efficiency, SimulationResult, SimulationSettings, simulate
from plans.simulate.settings import Dispatch, Failure, Straggler
from plans.workflow import RlTask, TaskKind
from tests.unit.plans.simulate.builders import cluster_of, job_of, one_gpu_each, plan_of, task_plan


@pytest.mark.parametrize(("hbm", "step_s"), [(1.0, 2.88768e-6), (0.01, 5.05344e-5)])
def test_decode_of_equal_sequences_takes_one_step_per_token_after_one_prefill(hbm: float, step_s: float) -> None:
    """8 samples fit the decode batch: 1 prefill and 8 steps.

    Prefill: 8 x 16 tokens, attended 8 x 136 = 1,088: 4 x (2 x 128 x 40,960 + 4 x 1,088 x 64) = 43,057,152 FLOP, logits
    2 x 8 x 64 x 100 = 102,400 FLOP: 4.3159552e-5 s.
    Step, in the middle of 8: the cache has 8 x (16 + 4) = 160 tokens. Compute: 4 x (2 x 8 x 40,960 + 4 x 160 x 64) +
    102,400 = 2,887,680 FLOP. Memory: layers and head 2 x (4 x 41,088 + 6,400) = 341,504 bytes and cache 160 x 4 x 2 x
    64 x 2 = 163,840 bytes, 505,344 bytes together: 5.05344e-7 s at full bandwidth (compute is slower), 5.05344e-5 s at
    1 %.
    """
    cluster, job = cluster_of(2), job_of()
    settings = SimulationSettings(iterations=1, efficiency={"unit": Efficiency(hbm=hbm)})
    result = simulate(cluster, job, one_gpu_each(cluster, job, "m0/0", "m1/0"), settings)
    generation = [i for i in result.intervals if i.activity == "actor_generation"]
    assert len(generation) == 1
    assert generation[0].end_s == pytest.approx(4.3159552e-5 + 8 * step_s, rel=1e-9)


def test_two_stages_prefill_and_decode_in_two_groups() -> None:
    """8 samples in 2 groups of 4 through 2 stages of 2 layers.

    Prefill of a group: 64 tokens, attended 544: 2 x (2 x 64 x 40,960 + 4 x 544 x 64) = 10,764,288 FLOP a stage, logits
    2 x 4 x 64 x 100 = 51,200 on the last. Hop: 64 x 64 x 2 bytes over 1e12 bytes/s. Both stages, the hop, and the last
    stage once more for the second group: 1.0764288e-5 + 8.192e-9 + 2 x 1.0815488e-5.
    Step: 2 x (2 x 4 x 40,960 + 4 x 80 x 64) + 51,200 = 747,520 FLOP on the last stage, twice: 1.49504e-6 s (more than
    both stages and the hop together, 1.444352e-6 s).
    """
    cluster, job = cluster_of(gpus=2), job_of()
    alone = task_plan([[["m0/0"]]], [8], [4])
    tasks = {RlTask.ACTOR_GENERATION: task_plan([[["m0/0"], ["m0/1"]]], [8], [2, 2])}
    tasks |= {RlTask.REFERENCE_INFERENCE: alone, RlTask.ACTOR_TRAINING: alone}
    result = simulate(cluster, job, plan_of(cluster, job, tasks), SimulationSettings(iterations=1))
    end_s = max(i.end_s for i in result.intervals if i.activity == "actor_generation")
    assert end_s == pytest.approx(1.0764288e-5 + 8.192e-9 + 2 * 1.0815488e-5 + 8 * 1.49504e-6, rel=1e-9)


def test_synchronous_iterations_are_equal_and_never_stale() -> None:
    cluster, job = cluster_of(2), job_of()
    result = simulate(cluster, job, one_gpu_each(cluster, job, "m0/0", "m1/0"), SimulationSettings(iterations=3))
    assert result.iteration_s == pytest.approx([result.iteration_s[0]] * 3, rel=1e-9)
    assert result.staleness == {0: 3 * job.num_samples}


def test_tasks_on_one_gpu_never_overlap() -> None:
    cluster, job = cluster_of(), job_of()
    result = simulate(cluster, job, one_gpu_each(cluster, job, "m0/0", "m0/0"), SimulationSettings(iterations=2))
    spans = sorted((i.start_s, i.end_s) for i in result.intervals)
    assert all(earlier[1] <= later[0] + 1e-15 for earlier, later in itertools.pairwise(spans))


@pytest.mark.parametrize("staleness", [1, 2])
def test_asynchronous_run_is_faster_than_synchronous_and_keeps_the_bound(staleness: int) -> None:
    cluster = cluster_of(2)
    sync_job, async_job = job_of(response=400), job_of(mode="async", staleness=staleness, response=400)
    settings = SimulationSettings(iterations=6)
    sync = simulate(cluster, sync_job, one_gpu_each(cluster, sync_job, "m0/0", "m1/0"), settings)
    overlapped = simulate(cluster, async_job, one_gpu_each(cluster, async_job, "m0/0", "m1/0"), settings)
    assert overlapped.steady_iteration_s < sync.steady_iteration_s
    assert max(overlapped.staleness) <= staleness
    assert sum(overlapped.staleness.values()) == 6 * async_job.num_samples


def test_straggler_slows_its_iteration_by_its_share() -> None:
    cluster, job = cluster_of(), job_of()
    plan = one_gpu_each(cluster, job, "m0/0", "m0/0")
    base = simulate(cluster, job, plan, SimulationSettings(iterations=1))
    slow = simulate(
        cluster, job, plan, SimulationSettings(iterations=1, stragglers=(Straggler(gpu="m0/0", slowdown=2.0),))
    )
    assert slow.iteration_s[0] == pytest.approx(2 * base.iteration_s[0], rel=1e-9)


def test_outage_ends_the_work_on_the_machine_and_the_run_still_completes() -> None:
    cluster, job = cluster_of(2), job_of()
    plan = one_gpu_each(cluster, job, "m0/0", "m1/0")
    base = simulate(cluster, job, plan, SimulationSettings(iterations=1))
    start, end = next((i.start_s, i.end_s) for i in base.intervals if i.activity == "actor_training")
    outage = Failure(machine="m1", at_s=(start + end) / 2, down_s=1.0)
    hit = simulate(cluster, job, plan, SimulationSettings(iterations=1, failures=(outage,)))
    assert hit.lost_work == 1
    assert hit.iteration_s[0] > base.iteration_s[0] + 1.0
    assert hit.staleness == {0: job.num_samples}


def test_outage_during_generation_loses_unfinished_samples_only() -> None:
    cluster, job = cluster_of(2), job_of(prompts=8)
    plan = one_gpu_each(cluster, job, "m0/0", "m1/0")
    base = simulate(cluster, job, plan, SimulationSettings(iterations=1))
    generated_by = max(i.end_s for i in base.intervals if i.activity == "actor_generation")
    outage = Failure(machine="m0", at_s=generated_by * 0.75, down_s=1.0)
    hit = simulate(cluster, job, plan, SimulationSettings(iterations=1, failures=(outage,)))
    lost_s = hit.iteration_s[0] - base.iteration_s[0] - 1.0
    assert hit.lost_work == 1
    assert 0 < lost_s < generated_by


def test_data_parallel_gradients_share_the_link_and_cost_its_time() -> None:
    """Two replicas on two machines: each ring edge carries 2(R-1)/R = 1 gradient of 354,304 bytes at 1e6 bytes/s."""
    cluster, job = cluster_of(2, bandwidth_gbps=0.008), job_of()
    half = [job.num_samples // 2] * 2
    both, one = [[["m0/0"]], [["m1/0"]]], [[["m0/0"]]]
    whole = [job.num_samples]
    plan = plan_of(
        cluster,
        job,
        {
            RlTask.ACTOR_GENERATION: task_plan(one, whole, [4], decode_batch=8),
            RlTask.REFERENCE_INFERENCE: task_plan(one, whole, [4]),
            RlTask.ACTOR_TRAINING: task_plan(both, half, [4]),
        },
    )
    result = simulate(cluster, job, plan, SimulationSettings(iterations=1))
    training = [i for i in result.intervals if i.activity == "actor_training"]
    reduce_s = 354_304 / 1e6
    assert training[0].end_s - training[0].start_s == pytest.approx(reduce_s, rel=0.01)


def test_weights_cross_to_the_generating_machine_once() -> None:
    cluster, job = cluster_of(2), job_of()
    apart = simulate(cluster, job, one_gpu_each(cluster, job, "m0/0", "m1/0"), SimulationSettings(iterations=1))
    end_of_training = max(i.end_s for i in apart.intervals)
    moved_bytes = job.models.actor.llm.parameters * 2
    assert apart.iteration_s[0] - end_of_training == pytest.approx(moved_bytes / 1e9, rel=1e-6)


def test_faster_hardware_by_a_factor_divides_the_time_by_it() -> None:
    cluster, job = cluster_of(2), job_of()
    plan = one_gpu_each(cluster, job, "m0/0", "m1/0")
    base = simulate(cluster, job, plan, SimulationSettings(iterations=1))
    half = Efficiency(compute=0.5, hbm=0.5, network=0.5)
    slow = simulate(cluster, job, plan, SimulationSettings(iterations=1, efficiency={"unit": half}))
    assert slow.iteration_s[0] == pytest.approx(2 * base.iteration_s[0], rel=1e-9)


def test_efficiency_counts_by_kind_of_task_between_machines_and_per_layer() -> None:
    """Inference and training run at half speed, weights cross at a quarter, each of 8 steps waits 4 x 1 us."""
    cluster, job = cluster_of(2), job_of()
    plan = one_gpu_each(cluster, job, "m0/0", "m1/0")
    slow = Efficiency(
        compute_by_kind={TaskKind.INFERENCE: 0.5, TaskKind.TRAINING: 0.5},
        network_between=0.25,
        decode_layer_overhead_s=1e-6,
    )
    base, hit = (
        simulate(cluster, job, plan, SimulationSettings(iterations=1, efficiency=efficiency))
        for efficiency in ({}, {"unit": slow})
    )
    ends = {name: [_spans(result)[name] for result in (base, hit)] for name in _spans(base)}
    assert ends["actor_generation"][1] == pytest.approx(ends["actor_generation"][0] + 8 * 4 * 1e-6, rel=1e-9)
    assert ends["reference_inference"][1] == pytest.approx(2 * ends["reference_inference"][0], rel=1e-9)
    moved = [result.iteration_s[0] - sum(_spans(result).values()) for result in (base, hit)]
    assert moved[1] == pytest.approx(4 * moved[0], rel=1e-6)


def _spans(result: SimulationResult) -> dict[str, float]:
    return {interval.activity: interval.end_s - interval.start_s for interval in result.intervals}


def test_queue_dispatch_helps_when_the_planned_shares_are_unequal() -> None:
    cluster, job = cluster_of(2), job_of(prompts=16)
    plan = plan_of(
        cluster,
        job,
        {
            RlTask.ACTOR_GENERATION: task_plan([[["m0/0"]], [["m1/0"]]], [28, 4], [4], decode_batch=2),
            RlTask.REFERENCE_INFERENCE: task_plan([[["m0/0"]]], [32], [4]),
            RlTask.ACTOR_TRAINING: task_plan([[["m0/0"]]], [32], [4]),
        },
    )
    settings = SimulationSettings(iterations=1)
    planned = simulate(cluster, job, plan, settings)
    queued = simulate(cluster, job, plan, dataclasses.replace(settings, dispatch=Dispatch.QUEUE))
    assert queued.iteration_s[0] < planned.iteration_s[0]


def test_same_seed_repeats_and_observed_lengths_are_used() -> None:
    cluster, job = cluster_of(2), job_of(response=64)
    plan = one_gpu_each(cluster, job, "m0/0", "m1/0")
    settings = SimulationSettings(iterations=2, seed=3, lengths=(1, 2, 60))
    first, second = (simulate(cluster, job, plan, settings) for _ in range(2))
    other = simulate(cluster, job, plan, dataclasses.replace(settings, seed=4))
    assert first.to_document() == second.to_document()
    assert first.to_document() != other.to_document()


def test_bad_settings_are_refused_together() -> None:
    cluster, job = cluster_of(2), job_of()
    settings = SimulationSettings(iterations=0, lengths=(0,), stragglers=(Straggler(gpu="m0/0", slowdown=0.5),))
    with pytest.raises(SpecError, match="iterations") as caught:
        simulate(cluster, job, one_gpu_each(cluster, job, "m0/0", "m1/0"), settings)
    assert [fault.field for fault in caught.value.faults] == ["iterations", "stragglers[m0/0].slowdown", "lengths"]


def test_settings_that_name_what_the_cluster_does_not_have_are_refused_together() -> None:
    cluster, job = cluster_of(2), job_of()
    settings = SimulationSettings(
        stragglers=(Straggler(gpu="m9/0", slowdown=2.0),),
        failures=(Failure(machine="m9", at_s=1.0, down_s=1.0),),
        efficiency={"unit": Efficiency(hbm=0.0, network=float("nan"), step_overhead_s=-1.0), "H900": Efficiency()},
    )
    with pytest.raises(SpecError, match="m9/0") as caught:
        simulate(cluster, job, one_gpu_each(cluster, job, "m0/0", "m1/0"), settings)
    assert [fault.field for fault in caught.value.faults] == [
        "stragglers[m9/0].gpu", "failures[m9].machine", "efficiency[unit].hbm", "efficiency[unit].network",
        "efficiency[unit].step_overhead_s", "efficiency[H900]",
    ]  # fmt: skip


def test_plan_of_another_cluster_is_refused() -> None:
    cluster, job = cluster_of(2), job_of()
    plan = one_gpu_each(cluster_of(3), job, "m0/0", "m1/0")
    with pytest.raises(PlanMismatchError, match="another cluster"):
        simulate(cluster, job, plan, SimulationSettings())
