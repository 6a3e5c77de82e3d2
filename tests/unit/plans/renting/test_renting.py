"""Price lists and what is rented from them."""

import itertools

import numpy as np
import pytest

from plans.cost import CostModel, price
from plans.errors import InfeasibleError, NoIncumbentError, SearchError, SpecError
from plans.renting import estimate, load_offers, rent_for_throughput, rent_within_budget
from plans.renting.choose import NothingAffordableError, ThroughputOutOfReachError
from plans.renting.estimate import OfferRates, offer_rates
from plans.search.budget import Budget
from plans.search.planner import make_plan
from plans.workflow import RlTask
from tests.helpers.planner_cases import paper_job

TEXT = """
format: motley.offers/1
name: two-regions
offers:
  - {name: fast, region: east, gpu: A100-40, gpus_per_machine: 4, machines: 2, usd_per_hour: 4.0, intra_gb_s: 600}
  - {name: cheap, region: west, gpu: L40S, gpus_per_machine: 4, machines: 2, usd_per_hour: 1.5, intra_gb_s: 64}
  - {name: small, region: west, gpu: L4, gpus_per_machine: 2, machines: 1, usd_per_hour: 0.5, intra_gb_s: 64}
links:
  same_zone: {latency_ms: 0, bandwidth_gbps: 100}
  regions: [{between: [east, west], latency_ms: 20, bandwidth_gbps: 5}]
"""
MODEL = CostModel.calibrated()
LIMIT = Budget(evaluations=30)


def job_of(shape="qwen3-1.7b", mode="async"):
    return paper_job(shape, algorithm="grpo", mode=mode, prompts=24)


def offers_of(text=TEXT):
    return load_offers(text, "offers.yaml")


def throughput_of(cluster, job):
    """Samples per second of the method's plan; 0 where the job does not fit."""
    try:
        return make_plan(cluster, job, "areal-hex", MODEL, LIMIT).report.throughput_samples_s
    except InfeasibleError:
        return 0.0


def test_prices_that_are_missing_are_named_in_one_sentence():
    text = TEXT.replace("usd_per_hour: 4.0, ", "").replace("usd_per_hour: 0.5, ", "")
    with pytest.raises(SpecError, match="without usd_per_hour for fast, small, but every offer states") as caught:
        offers_of(text)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("usd_per_hour: 4.0", "usd_per_hour: .nan", "offers[0].usd_per_hour is nan, but numbers are finite"),
        ("usd_per_hour: 4.0", "usd_per_hour: -1", "offers[0].usd_per_hour is -1, but it should be greater"),
        ("usd_per_hour: 4.0", "usd_per_hour: 1e308", "offers[0].usd_per_hour is 1e+308, but it should be less"),
        ("name: small", "name: fast", "offers[2].name is 'fast', but names of offers are unique"),
    ],
)
def test_price_or_name_that_cannot_be_is_one_sentence_with_its_place(old, new, fault):
    with pytest.raises(SpecError) as caught:
        offers_of(TEXT.replace(old, new))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"offers.yaml: {fault}")


def test_offers_with_unknown_types_and_missing_links_are_refused():
    with pytest.raises(SpecError, match=r"offers\[1\].gpu is 'L50'"):
        offers_of(TEXT.replace("L40S", "L50"))
    with pytest.raises(SpecError, match="east"):
        offers_of(TEXT.replace("  regions: [{between: [east, west], latency_ms: 20, bandwidth_gbps: 5}]\n", ""))


def test_cluster_of_a_set_has_its_machines_prices_and_links_only():
    cluster = offers_of().cluster([0, 2, 1])
    assert [m.name for m in cluster.machines] == ["cheap-0", "cheap-1", "small-0"]
    assert cluster.links.regions == ()
    assert cluster.gpu_type("L40S").usd_per_hour == 1.5
    assert offers_of().describe([0, 2, 1]) == "2 x cheap (4 x L40S) + 1 x small (2 x L4)"


def test_rental_keeps_the_budget_and_its_plan_is_priced():
    offers = offers_of()
    rental = rent_within_budget(offers, job_of(), 23.0, MODEL, budget=LIMIT, most_plans=4)
    assert rental.usd_per_hour == offers.usd_per_hour(rental.counts) <= 23.0
    cluster = offers.cluster(rental.counts)
    assert price(cluster, job_of(), rental.result.plan, MODEL) == rental.result.report
    assert rental.result.plan.method == "areal-hex"
    assert len(rental.considered) <= 4
    assert max(e.throughput_samples_s for e in rental.considered) == rental.throughput_samples_s


def test_rental_is_the_best_of_all_affordable_sets():
    offers, job = offers_of(), job_of()
    rental = rent_within_budget(offers, job, 13.0, MODEL, budget=LIMIT, most_plans=50)
    best = 0.0
    for counts in itertools.product(range(3), range(3), range(2)):
        if any(counts) and offers.usd_per_hour(counts) <= 13.0:
            best = max(best, throughput_of(offers.cluster(counts), job))
    assert rental.throughput_samples_s == pytest.approx(best)


def test_sync_job_is_rented_for_with_the_default_method():
    rental = rent_within_budget(offers_of(), job_of(mode="sync"), 7.0, MODEL, budget=LIMIT, most_plans=2)
    assert rental.result.plan.method == "sha-ea"


def test_budget_that_buys_nothing_says_the_least_that_would_do():
    with pytest.raises(NothingAffordableError, match=r"the least that would do is \d+\.\d\d \$/h for .*L40S") as caught:
        rent_within_budget(offers_of(), job_of("qwen3-8b"), 2.0, MODEL, budget=LIMIT)
    least = caught.value.least_usd_per_hour
    rental = rent_within_budget(offers_of(), job_of("qwen3-8b"), least, MODEL, budget=LIMIT)
    assert rental.usd_per_hour == pytest.approx(least)


def test_job_that_no_offered_set_holds_says_so():
    with pytest.raises(NothingAffordableError, match="no set of the offered machines") as caught:
        rent_within_budget(offers_of(), job_of("qwen3-32b"), 1000.0, MODEL, budget=LIMIT)
    assert caught.value.least_usd_per_hour is None


def test_cheapest_set_for_a_throughput_costs_no_more_than_the_budget_that_reached_it():
    best = rent_within_budget(offers_of(), job_of(), 13.0, MODEL, budget=LIMIT, most_plans=50)
    rental = rent_for_throughput(offers_of(), job_of(), best.throughput_samples_s * 0.99, MODEL, budget=LIMIT)
    assert rental.throughput_samples_s >= best.throughput_samples_s * 0.99
    assert rental.usd_per_hour <= best.usd_per_hour


def test_throughput_out_of_reach_names_what_was_found():
    with pytest.raises(ThroughputOutOfReachError, match="optimistic estimate gives at most"):
        rent_for_throughput(offers_of(), job_of(), 1e6, MODEL, budget=LIMIT)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_budget_and_throughput_are_positive(value):
    with pytest.raises(SearchError, match="positive number"):
        rent_within_budget(offers_of(), job_of(), value, MODEL)
    with pytest.raises(SearchError, match="positive number"):
        rent_for_throughput(offers_of(), job_of(), value, MODEL)


def test_price_list_with_too_many_sets_is_refused():
    rows = "".join(
        f"  - {{name: o{i}, region: r, gpu: L4, gpus_per_machine: 1, machines: 99, usd_per_hour: 1}}\n"
        for i in range(3)
    )
    links = "links: {same_zone: {latency_ms: 0, bandwidth_gbps: 1}}\n"
    text = f"format: motley.offers/1\nname: big\noffers:\n{rows}{links}"
    with pytest.raises(SearchError, match="1000000 sets"):
        rent_within_budget(offers_of(text), job_of("qwen3-0.6b"), 5.0, MODEL)


def test_estimate_balances_both_sides_by_comparative_advantage():
    rates = OfferRates(np.array([2.0, 4.0]), np.array([6.0, 1.0]), overlaps=True)
    # One of each: the second generates 4, the first must train 4 and may help: 4 + 2 f = 6 - 6 f at f = 1/4.
    assert rates.throughput(np.array([[1, 1], [1, 0], [0, 2]])) == pytest.approx([4.5, 1.5, 1.6])
    serial = OfferRates(np.array([2.0, 4.0]), np.array([6.0, 1.0]), overlaps=False)
    assert serial.throughput(np.array([[1, 1]])) == pytest.approx([6 * 7 / 13])


def test_estimate_is_above_what_plans_reach():
    offers, job = offers_of(), job_of()
    rates = offer_rates(offers, job, MODEL)
    for counts in ([1, 0, 0], [1, 1, 0], [2, 2, 1]):
        result = make_plan(offers.cluster(counts), job, "areal-hex", MODEL, LIMIT)
        assert result.report.throughput_samples_s <= rates.throughput(np.array([counts]))[0]


def test_budget_that_holds_the_job_but_finds_no_plan_says_so_and_not_a_smaller_budget(monkeypatch):
    def fails(*_arguments, **_options):
        raise NoIncumbentError("no plan within the budget")

    monkeypatch.setattr("plans.renting.choose.make_plan", fails)
    with pytest.raises(NothingAffordableError, match=r"fits .* but no plan was found on the 2 sets") as caught:
        rent_within_budget(offers_of(), job_of(), 13.0, MODEL, budget=LIMIT, most_plans=2)
    assert "give each search a larger budget" in str(caught.value)
    assert "least that would do" not in str(caught.value)


def test_each_planned_set_is_reported_while_the_search_goes_on():
    told = []
    rental = rent_within_budget(offers_of(), job_of(), 13.0, MODEL, budget=LIMIT, most_plans=3, on_planned=told.append)
    assert len({entry.counts for entry in told}) == len(told) > 0
    assert tuple(told) == rental.considered


SMALL_GPUS = """
format: motley.offers/1
name: many-small
gpu_types: {chip: {memory_gb: 0.5, tflops: 10, hbm_gb_s: 300, usd_per_hour: 1, reserve_gb: 0}}
offers: [{name: one, region: r, gpu: chip, gpus_per_machine: 1, machines: 36, usd_per_hour: 1}]
links: {same_zone: {latency_ms: 0, bandwidth_gbps: 100}}
"""


@pytest.mark.parametrize("spanned", [1, estimate.SPANNED])
def test_job_whose_replica_needs_many_machines_is_planned_though_the_estimate_may_not_see_it(monkeypatch, spanned):
    monkeypatch.setattr(estimate, "SPANNED", spanned)
    shape = {"layers": 24, "hidden": 1024, "intermediate": 3072, "heads": 8, "kv_heads": 8, "head_dim": 128,
             "vocab": 1000, "tied": True}  # fmt: skip
    job = job_of()
    models = job.models.model_validate(
        {"actor": {"shape": shape}, "reference": {"shape": shape}, "reward": {"verifier": "x"}}
    )
    lengths = job.lengths.model_validate({"prompt": 64, "response": 64})
    generation = job.generation.model_copy(update={"memory_fraction": 0.3})
    job = job.model_copy(update={"models": models, "lengths": lengths, "generation": generation})
    offers = offers_of(SMALL_GPUS)
    assert bool(offer_rates(offers, job, MODEL).generation[0] > 0) is (spanned > 1)
    rental = rent_within_budget(offers, job, 36.0, MODEL, budget=Budget(evaluations=60), most_plans=3)
    assert len(rental.result.plan.tasks[RlTask.ACTOR_GENERATION].replicas[0].stages) > 4
