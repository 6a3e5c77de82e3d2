"""The fast pricing of searches gives the numbers of the readable cost model, on the testbeds and on random plans."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.balance import balance_layers
from plans.cost import CompactPlan, CostModel, PlanEvaluator, plan_of, price
from plans.cost.collectives import LinkTimes, best_ring
from plans.cost.compact import CompactTask
from plans.cost.model import Fanout
from plans.cost.transfer import WeightLine, transfer_s
from plans.search.balancing import share_samples
from plans.search.genome import Genome
from plans.search.groupings import task_groupings
from plans.search.problem import Problem
from plans.search.random_search import random_sizes
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.spec.job import Algorithm, Mode
from plans.testbeds.jobs import hetrl_job
from plans.testbeds.registry import find_testbed
from plans.testbeds.registry import testbed_names as names_of_testbeds
from plans.workflow import RlTask, shape_of
from tests.helpers.planner_cases import random_plan

TESTBEDS = tuple(name for name in names_of_testbeds() if not name.startswith("scaling-") or name == "scaling-128")
MODELS = (
    CostModel.paper(),
    CostModel.calibrated(),
    CostModel.calibrated(fanout=Fanout.DIRECT, delta_fraction=0.5),
    CostModel.paper(fanout=Fanout.SEQUENTIAL),
)
seeds = st.integers(0, 2**32 - 1)
algorithms, modes = st.sampled_from(["ppo", "grpo"]), st.sampled_from(["sync", "async"])


DEGREES = st.integers(1, 4)


def drawn_task(gpus: np.ndarray, pp: int, tp: int, rng: np.random.Generator) -> CompactTask:
    """Return a placement on the first GPUs, as many replicas as fit, layers of 36 cut at random."""
    pp, tp = min(pp, len(gpus)), min(tp, len(gpus) // min(pp, len(gpus)))
    dp = len(gpus) // (pp * tp)
    cuts = np.sort(rng.choice(np.arange(1, 36), size=pp - 1, replace=False)) if pp > 1 else []
    layers = tuple(int(count) for count in np.diff([0, *cuts, 36]))
    return CompactTask(gpus[: dp * pp * tp].reshape(dp, pp, tp), layers, (1,) * dp)


@cache
def tools_of(testbed: str, algorithm: str, mode: str, model: int) -> SearchTools:
    job = hetrl_job("4b", Algorithm(algorithm), Mode(mode))
    return SearchTools(Problem(find_testbed(testbed).cluster, job, MODELS[model]))


def built_genome(tools: SearchTools, rng: Draws) -> Genome:
    """Return a candidate as searches make them: random groups, TP inside machines."""
    problem = tools.problem
    groupings = task_groupings(problem.workflow)
    grouping = groupings[rng.below(len(groupings))]
    genome = tools.seeder.random(grouping, random_sizes(grouping, problem.view.num_gpus, rng), rng)
    layouts = dict(genome.layouts)
    for task in layouts:
        guesses = tools.ranker.guesses(task, genome.gpus[genome.group_of(task)])
        layouts[task] = guesses.build(guesses.random_recipe(rng)) or layouts[task]
    return Genome(genome.grouping, genome.gpus, layouts)


def built_plan(tools: SearchTools, rng: Draws) -> CompactPlan | None:
    """Return a plan as searches make them, with balanced layers and samples."""
    return tools.pricer.compact(built_genome(tools, rng))


@settings(max_examples=80, deadline=None)
@given(seed=seeds, testbed=st.sampled_from(TESTBEDS), algorithm=algorithms, mode=modes,
       model=st.integers(0, len(MODELS) - 1), is_built=st.booleans())  # fmt: skip
def test_kept_replicas_rings_and_transfers_price_like_the_formulas(seed, testbed, algorithm, mode, model, is_built):
    tools = tools_of(testbed, algorithm, mode, model)
    cluster, job = tools.problem.cluster, tools.problem.job
    plan = built_plan(tools, Draws(seed)) if is_built else random_plan(cluster, job, np.random.default_rng(seed))
    if plan is None:
        return
    fast = tools.problem.evaluator.evaluate(plan)
    report = price(cluster, job, plan_of(plan, cluster, job, method="random"), MODELS[model])
    assert (report.feasible, report.decode_batches) == (fast.feasible, fast.decode_batches)
    if report.iteration_s is None:
        assert not np.isfinite(fast.iteration_s)
        return
    assert fast.iteration_s == pytest.approx(report.iteration_s, rel=1e-12)
    assert list(fast.task_s.values()) == pytest.approx([t.total_s for t in report.tasks.values()], rel=1e-12)
    assert fast.phases.transfer_s == pytest.approx(report.phases.transfer_s, rel=1e-12, abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, testbed=st.sampled_from(TESTBEDS), algorithm=algorithms, mode=modes,
       model=st.integers(0, len(MODELS) - 1))  # fmt: skip
def test_a_candidate_costs_what_its_balanced_plan_costs(seed, testbed, algorithm, mode, model):
    tools = tools_of(testbed, algorithm, mode, model)
    genome = built_genome(tools, Draws(seed))
    evaluation = tools.pricer.evaluation(genome)
    expected = (np.inf, np.inf) if evaluation is None else (evaluation.score_s, evaluation.overflow_bytes)
    assert tuple(tools.pricer.price(genome)) == expected


@settings(max_examples=60, deadline=None)
@given(seed=seeds, testbed=st.sampled_from(TESTBEDS), model=st.integers(0, len(MODELS) - 1), t=DEGREES, p=DEGREES,
       t_g=DEGREES, p_g=DEGREES, apart=st.booleans())  # fmt: skip
def test_transfers_between_placements_of_any_degrees_equal_the_formulas(seed, testbed, model, t, p, t_g, p_g, apart):
    """Same GPUs, some in common or none; TP degrees that divide each other and that do not; stages over machines."""
    evaluator, rng = tools_of(testbed, "ppo", "sync", model).problem.evaluator, np.random.default_rng(seed)
    gpus = rng.permutation(evaluator.view.num_gpus) if seed % 2 else np.arange(evaluator.view.num_gpus)
    half = len(gpus) // 2
    training = drawn_task(gpus[:half], p, t, rng)
    generation = drawn_task(gpus[half:] if apart else rng.permutation(gpus)[:half], p_g, t_g, rng)
    for source, target in ((training, generation), (training, drawn_task(training.flat, p_g, t_g, rng))):
        slots = [[list(zip(c.layers, stages, strict=True)) for stages in c.stages] for c in (source, target)]
        line = WeightLine.of(shape_of(evaluator.job, RlTask.ACTOR_TRAINING), evaluator.job.weight_bytes_per_parameter)
        expected = transfer_s(line, evaluator.view, evaluator.links, MODELS[model], *slots)
        assert evaluator.transfer_s(source, target) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, testbed=st.sampled_from(TESTBEDS[:2]), algorithm=algorithms)
def test_what_was_kept_from_other_plans_changes_no_price(seed, testbed, algorithm):
    tools, rng = tools_of(testbed, algorithm, "sync", 0), Draws(seed)
    for plan in [built_plan(tools, rng) for _ in range(4)]:
        if plan is not None:
            fresh = PlanEvaluator(tools.problem.cluster, tools.problem.job, MODELS[0])
            assert tools.problem.evaluator.evaluate(plan) == fresh.evaluate(plan)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, per_step=st.booleans())
def test_rings_kept_by_the_order_of_links_equal_rings_worked_out(seed, per_step):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 5))
    latency = rng.choice([0.0, 1e-4, 1e-2, np.inf], size=(size, size), p=[0.4, 0.3, 0.2, 0.1])
    inverse = rng.choice([1e-12, 1e-10, 1e-9], size=(size, size))
    latency, inverse = np.maximum(latency, latency.T), np.maximum(inverse, inverse.T)
    np.fill_diagonal(latency, 0.0)
    links = LinkTimes(latency, inverse, latency_per_step=per_step)
    counts = rng.integers(1, 4, size=size).tolist()
    machines = tuple(np.repeat(np.arange(size), counts).tolist())
    for num_bytes in (10.0 ** rng.uniform(3, 9, size=6)).tolist():
        steps = 2 * (len(machines) - 1) if per_step else 1
        expected = best_ring(counts, steps * latency + num_bytes * inverse).bottleneck_s
        assert links.ring_s(machines, num_bytes) == expected


@settings(max_examples=200, deadline=None)
@given(total=st.integers(1, 60), units=st.lists(st.sampled_from([0.1, 0.3, 1.0, 1.7, 50.0]), min_size=1, max_size=9))
def test_samples_shared_by_class_equal_samples_given_one_by_one(total, units):
    if total < len(units):
        return
    shares = [1] * len(units)
    for _ in range(total - len(units)):
        shares[min(range(len(units)), key=lambda i: ((shares[i] + 1) * units[i], i))] += 1
    found = share_samples(total, units)
    assert (sum(found), min(found) >= 1) == (total, True)
    worst = max(n * unit for n, unit in zip(found, units, strict=True))
    assert worst == pytest.approx(max(n * unit for n, unit in zip(shares, units, strict=True)), rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(seed=seeds)
def test_layers_with_a_certain_start_equal_layers_given_one_by_one(seed):
    rng = np.random.default_rng(seed)
    stages, layers = int(rng.integers(1, 7)), int(rng.integers(7, 40))
    costs, fixed = rng.choice([0.5, 1.0, 1.3, 20.0], size=stages).tolist(), rng.choice([0.0, 3.0], size=stages).tolist()
    caps = rng.integers(6, 40, size=stages).tolist()
    if sum(caps) < layers:
        return
    shares = [1] * stages
    for _ in range(layers - stages):
        able = [j for j in range(stages) if shares[j] < caps[j]]
        shares[min(able, key=lambda j: ((shares[j] + 1) * costs[j] + fixed[j], j))] += 1
    assert balance_layers(layers, costs, fixed_s=fixed, caps=caps) == tuple(shares)
