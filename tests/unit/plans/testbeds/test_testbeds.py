"""Testbeds: valid clusters, published numbers, YAML that loads back."""

from pathlib import Path

import numpy as np
import pytest

from plans.spec.job import Algorithm, Mode
from plans.spec.load import load_cluster, load_job
from plans.testbeds.document import cluster_yaml, job_yaml
from plans.testbeds.jobs import SIZES, hetrl_job
from plans.testbeds.registry import HETRL_SCENARIOS, find_testbed
from plans.testbeds.registry import testbed_names as all_names
from plans.testbeds.testbed import UnknownTestbedError
from plans.testbeds.wan import REGIONS, delay_ms

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


@pytest.mark.parametrize("name", [name for name in all_names() if name not in {"scaling-2048", "scaling-4096"}])
def test_testbed_yaml_loads_back_to_the_same_cluster(name):
    testbed = find_testbed(name)
    assert load_cluster(cluster_yaml(testbed), name).fingerprint == testbed.cluster.fingerprint
    assert testbed.published
    assert testbed.reconstructed


@pytest.mark.parametrize("name", HETRL_SCENARIOS)
def test_hetrl_scenarios_have_the_gpus_of_table_1(name):
    view = find_testbed(name).cluster.view
    counts = dict(zip(*np.unique([view.type_names[t] for t in view.type_of], return_counts=True), strict=True))
    assert counts == {"A100-40": 24, "L40S": 24, "L4": 16}
    assert float(view.hbm_bytes_per_s[view.gpu_index[view.gpu_ids[0]]]) == 2039e9


@pytest.mark.parametrize(
    ("name", "delay", "gbps"),
    [("hetrl-multi-country", (5.0, 30.0), (1.9, 5.0)), ("hetrl-multi-continent", (5.0, 60.0), (0.9, 5.0))],
)
def test_wan_links_stay_in_the_published_ranges(name, delay, gbps):
    links = find_testbed(name).cluster.links.regions
    assert len(links) == 28
    assert all(delay[0] <= link.latency_ms <= delay[1] and gbps[0] <= link.bandwidth_gbps <= gbps[1] for link in links)


def test_hybrid_edge_reaches_virginia_only():
    view = find_testbed("hetrl-multi-region-hybrid").cluster.view
    edge, ohio, virginia = (view.gpu_index[f"{name}/0"] for name in ("ed-0", "oh-0", "vi-0"))
    assert np.isinf(view.edge(edge, ohio).latency_s)
    assert view.edge(edge, virginia).bytes_per_s == 1e9 / 8
    assert view.edge(virginia, ohio).bytes_per_s == 5e9 / 8


@pytest.mark.parametrize(
    ("name", "usd"),
    [("areal-hex-8-24", 86.64), ("areal-hex-h800-24", 126.72), ("areal-hex-h800-32", 168.96),
     ("areal-hex-h20-88", 162.80), ("areal-hex-24-24", 171.12)],
)  # fmt: skip
def test_areal_hex_budgets_add_up(name, usd):
    assert float(find_testbed(name).cluster.view.usd_per_hour.sum()) == pytest.approx(usd, abs=0.005)


def test_delay_table_is_complete_and_symmetric():
    for i, a in enumerate(REGIONS):
        for b in REGIONS[i + 1 :]:
            assert delay_ms(a, b) == delay_ms(b, a) > 0
    assert delay_ms("ohio", "stockholm") == 60.5
    assert delay_ms("london", "paris") == 4.5


def test_unknown_testbed_is_refused_with_the_names():
    with pytest.raises(UnknownTestbedError, match="hetrl-single-region"):
        find_testbed("nowhere")


@pytest.mark.parametrize("name", ["scaling-7", "scaling-8192", "scaling-0"])
def test_scaling_testbed_of_another_size_is_refused(name):
    with pytest.raises(UnknownTestbedError, match="multiples of 8"):
        find_testbed(name)


@pytest.mark.parametrize("file", sorted((EXAMPLES / "clusters").glob("*.yaml")), ids=lambda file: file.stem)
def test_example_cluster_is_the_generated_one(file):
    assert file.read_text(encoding="utf-8") == cluster_yaml(find_testbed(file.stem))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("mode", list(Mode))
def test_example_job_is_the_generated_one(size, algorithm, mode):
    job = hetrl_job(size, algorithm, mode)
    file = EXAMPLES / "jobs" / "planner" / f"{job.name}.yaml"
    assert load_job(file.read_text(encoding="utf-8"), str(file)).fingerprint == job.fingerprint
    assert load_job(job_yaml(job, "comment"), "job").fingerprint == job.fingerprint
