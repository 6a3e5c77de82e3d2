"""Documents of clusters and jobs: what is read, and that every fault is reported, together."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
import yaml

from plans.errors import FaultKind, PlanningError, SpecError
from plans.spec.job import EXECUTION_SECTIONS
from plans.spec.load import load_cluster, load_job

CLUSTER = """
format: motley.cluster/1
name: two-regions
gpu_types:
  A100-40: {memory_gb: 40, tflops: 312, hbm_gb_s: 2039, usd_per_hour: 4.10}
machines:
  - {name: va-0, region: virginia, zone: virginia-1, gpu: A100-40, count: 8, intra_gb_s: 600, queue: q}
  - {name: va-1, region: virginia, gpu: L4, count: 2, intra_gb_s: 64}
  - {name: oh-0, region: ohio, gpu: L40S, count: 2, intra_gb_s: 64}
links:
  same_zone: {latency_ms: 0, bandwidth_gbps: 400}
  same_region: {latency_ms: 0, bandwidth_gbps: 400}
  regions:
    - {between: [virginia, ohio], latency_ms: 10, bandwidth_gbps: 5}
  machines:
    - {between: [va-1, oh-0], forbidden: true}
    - {between: [va-1, va-0], latency_ms: 2, bandwidth_gbps: 1}
storage: {virginia: "s3://rl-virginia", ohio: "s3://rl-ohio"}
"""
JOB = """
format: motley.job/1
name: qwen3-8b-gsm8k-ppo
algorithm: ppo
mode: sync
max_staleness: 0
models:
  actor: {shape: qwen3-8b}
  critic: {shape: qwen3-8b}
  reference: {shape: qwen3-8b}
  reward: {shape: qwen3-8b}
batch: {prompts: 384, responses_per_prompt: 8}
lengths: {prompt: 1024, response: 1024}
training: {micro_batch_size: 1, recompute: full, optimizer: adam, precision: bf16-mixed}
generation: {max_num_seqs: 256, memory_fraction: 0.9}
"""


ASYNC = JOB.replace("mode: sync\nmax_staleness: 0", "mode: async\nmax_staleness: 1")


def faults_of(text: str, load=load_cluster) -> list[tuple[str, FaultKind]]:
    with pytest.raises(SpecError) as caught:
        load(text, "file.yaml")
    return [(fault.field, fault.kind) for fault in caught.value.faults]


def test_cluster_reads_the_contract_example() -> None:
    view = load_cluster(CLUSTER, "c.yaml").view
    assert view.gpu_ids[:2] == ("va-0/0", "va-0/1")
    assert view.num_gpus == 12
    assert (view.edge(0, 1).bytes_per_s, view.edge(0, 10).latency_s) == (600e9, 0.01)
    assert (view.edge(0, 8).bytes_per_s, view.edge(0, 8).latency_s) == (0.125e9, 0.002)
    assert (view.edge(8, 10).bytes_per_s, view.edge(8, 10).latency_s) == (0.0, float("inf"))
    assert (float(view.hbm_bytes_per_s[0]), float(view.compute_flop_per_s[8])) == (2039e9, 121e12)


def test_json_and_yaml_give_the_same_cluster_and_job() -> None:
    as_json = json.dumps(yaml.safe_load(CLUSTER))
    assert load_cluster(as_json, "c.json") == load_cluster(CLUSTER, "c.yaml")
    assert load_job(json.dumps(yaml.safe_load(JOB)), "j.json") == load_job(JOB, "j.yaml")


def test_fingerprint_depends_on_content_only() -> None:
    cluster = load_cluster(CLUSTER, "c.yaml")
    renamed = CLUSTER.replace("two-regions", "other").replace("queue: q", "queue: p").replace("400}", "400.0}")
    turned = renamed.replace("[virginia, ohio]", "[ohio, virginia]")
    assert load_cluster(turned, "d.yaml").fingerprint == cluster.fingerprint
    assert load_cluster(CLUSTER.replace("count: 8", "count: 7"), "c").fingerprint != cluster.fingerprint
    assert load_cluster(CLUSTER.replace("tflops: 312", "tflops: 311"), "c").fingerprint != cluster.fingerprint


def test_an_unreadable_link_is_not_reported_as_missing_too() -> None:
    text = CLUSTER.replace("latency_ms: 10, bandwidth_gbps: 5", "latency_ms: -10, bandwidth_gbps: 5")
    assert faults_of(text) == [("links.regions[0].latency_ms", FaultKind.OUT_OF_RANGE)]


def test_missing_region_pair_is_named() -> None:
    text = CLUSTER.replace("    - {between: [virginia, ohio], latency_ms: 10, bandwidth_gbps: 5}\n", "    []\n")
    with pytest.raises(SpecError, match="no link between regions ohio and virginia"):
        load_cluster(text, "c.yaml")


def test_unknown_gpu_is_an_error_with_a_near_name() -> None:
    """H13: one unknown type is named, and the rest of the file is read."""
    with pytest.raises(SpecError, match=r"machines\[1\].gpu is 'L4S'.*write 'L40S'"):
        load_cluster(CLUSTER.replace("gpu: L4,", "gpu: L4S,"), "c.yaml")


@pytest.mark.parametrize(
    ("load", "text", "field", "remedy"),
    [
        (load_cluster, CLUSTER.replace("gpu: L4,", "gpuu: L4,"), "machines[1].gpuu", "write 'gpu'"),
        (load_cluster, CLUSTER.replace("latency_ms: 10", "latncy_ms: 10"), "links.regions[0].latncy_ms",
         "write 'latency_ms'"),
        (load_cluster, CLUSTER.replace("tflops: 312", "tflop: 312"), "gpu_types.A100-40.tflop", "write 'tflops'"),
        (load_job, JOB + "optimiser: {}\n", "optimiser", "write 'optimizer'"),
        (load_job, JOB + "batches: 3\n", "batches", "write 'batch'"),
        (load_job, JOB.replace("precision: bf16-mixed", "precison: fp32"), "training.precison", "write 'precision'"),
        (load_job, JOB.replace("actor: {shape", "actor: {shap"), "models.actor.shap", "write 'shape'"),
        (load_job, JOB.replace("lengths: {", "lengths: {zz: 1, "), "lengths.zz",
         "correct the field's name (allowed here: prompt, prompt_mean, response, response_mean, response_std)"),
        (load_job, JOB + "zzzz: 1\n", "zzzz", "remove or correct the field's name."),
    ],
)  # fmt: skip
def test_an_unknown_field_comes_with_the_nearest_name_that_is_allowed_there(load, text, field, remedy) -> None:
    with pytest.raises(SpecError) as caught:
        load(text, "file.yaml")
    fault = next(fault for fault in caught.value.faults if fault.field == field)
    assert remedy in fault.sentence()


def test_faulty_entries_of_a_list_are_not_reported_as_a_list_that_is_too_short() -> None:
    text = "format: motley.cluster/1\nname: c\nmachines:\n - {name: a, region: r, gpu: A100, count: 0}\n"
    assert faults_of(text) == [("machines[0].count", FaultKind.OUT_OF_RANGE)]
    assert faults_of("format: motley.cluster/1\nname: c\nmachines: []\n") == [("machines", FaultKind.OUT_OF_RANGE)]


def test_all_faults_of_a_cluster_are_reported_together() -> None:
    text = (
        CLUSTER.replace("gpu: L4, count: 2", "gpu: L4, count: -1, cout: 3")
        .replace("latency_ms: 10, bandwidth_gbps: 5", "latency_ms: -10, bandwidth_gbps: 5")
        .replace("name: oh-0", "name: va-0")
        .replace("gpu: L40S", "gpu: L41S")
    )
    assert faults_of(text) == [
        ("machines[1].count", FaultKind.OUT_OF_RANGE),
        ("machines[1].cout", FaultKind.UNKNOWN_FIELD),
        ("links.regions[0].latency_ms", FaultKind.OUT_OF_RANGE),
        ("machines[2].name", FaultKind.CONFLICT),
        ("machines[2].gpu", FaultKind.UNKNOWN_NAME),
        ("links.machines[0].between", FaultKind.UNKNOWN_NAME),
    ]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (CLUSTER.replace("tflops: 312", "tflops: .nan"), "gpu_types.A100-40.tflops is nan, but numbers are finite"),
        (CLUSTER.replace("tflops: 312", "tflops: .inf"), "gpu_types.A100-40.tflops is inf"),
        (CLUSTER.replace("tflops: 312", "tflops: 0"), "gpu_types.A100-40.tflops is 0"),
        (CLUSTER.replace("count: 8", "count: '8'"), r'machines\[0\].count is "8", but it should be a valid integer'),
        (CLUSTER.replace("count: 8", "count: true"), r"machines\[0\].count is true"),
        (CLUSTER.replace("motley.cluster/1", "motley.cluster/9"), 'format is "motley.cluster/9"'),
        (CLUSTER.replace("format: motley.cluster/1\n", ""), "format is missing"),
        (CLUSTER.replace("intra_gb_s: 64}", "}", 1), "a machine with more than one GPU needs intra_gb_s"),
        (CLUSTER.replace("forbidden: true", "forbidden: false"), "forbidden"),
        (CLUSTER.replace("forbidden: true", "forbidden: true, latency_ms: 1"), "a forbidden link has neither"),
        (CLUSTER + "name: again\n", "the key 'name' is given twice"),
        ("[1, 2]", r"the document is \[1, 2\]"),
        ("{", "unreadable"),
        ("machines: 2026-01-01\n", "put the value in quotes"),
    ],
)
def test_bad_clusters_are_refused_with_one_sentence(text: str, match: str) -> None:
    with pytest.raises(SpecError, match=match) as caught:
        load_cluster(text, "c.yaml")
    assert isinstance(caught.value, PlanningError)
    assert str(caught.value).splitlines()[0].startswith("c.yaml: ")
    assert str(caught.value).splitlines()[0].endswith(".")


def test_job_reads_the_contract_example_and_carries_execution_sections() -> None:
    job = load_job(JOB + "iterations: 3\nsampling: {temperature: 1e0}\n", "j.yaml")
    assert (job.num_samples, job.lengths.total, job.weight_bytes_per_parameter) == (3072, 2048, 2)
    assert job.execution == {"iterations": 3, "sampling": {"temperature": 1.0}}
    assert job.fingerprint == load_job(JOB, "j.yaml").fingerprint


@pytest.mark.parametrize("section", sorted(EXECUTION_SECTIONS))
def test_every_execution_section_is_accepted_unread(section: str) -> None:
    assert load_job(f"{JOB}{section}: {{anything: [1, two]}}\n", "j.yaml").execution == {
        section: {"anything": [1, "two"]}
    }


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (JOB + "iteratons: 3\n", [("iteratons", FaultKind.UNKNOWN_FIELD)]),
        (JOB + "execution: {}\n", [("execution", FaultKind.UNKNOWN_FIELD)]),
        (JOB.replace("mode: sync", "mode: async"), [("max_staleness", FaultKind.CONFLICT)]),
        (JOB.replace("max_staleness: 0", "max_staleness: 2"), [("max_staleness", FaultKind.CONFLICT)]),
        *((ASYNC.replace("max_staleness: 1", f"max_staleness: {value}"), [("max_staleness", kind)])
          for value, kind in ((0, FaultKind.CONFLICT), (-1, FaultKind.OUT_OF_RANGE), (1.5, FaultKind.WRONG_TYPE),
                              (".nan", FaultKind.OUT_OF_RANGE), ("null", FaultKind.WRONG_TYPE))),
        (ASYNC.replace("mode: async", "mode: asink"), [("mode", FaultKind.OUT_OF_RANGE)]),
        (JOB.replace("lengths: {", "lengths: {response_mean: -1, response_std: 2, "),
         [("lengths.response_mean", FaultKind.OUT_OF_RANGE)]),
        (JOB.replace("critic: {shape: qwen3-8b}", "critic: {shape: 3}"),
         [("models.critic.shape", FaultKind.WRONG_TYPE)] * 2),
        (JOB.replace("  critic: {shape: qwen3-8b}\n", ""), [("models.critic", FaultKind.MISSING)]),
        (JOB.replace("algorithm: ppo", "algorithm: grpo"), [("models.critic", FaultKind.CONFLICT)]),
        (JOB.replace("actor: {shape: qwen3-8b}", "actor: {shape: qwen4}"),
         [("models.actor.shape", FaultKind.UNKNOWN_NAME)]),
        (JOB.replace("prompts: 384", "prompts: 0").replace("algorithm: ppo", "algorithm: dpo"),
         [("algorithm", FaultKind.OUT_OF_RANGE), ("batch.prompts", FaultKind.OUT_OF_RANGE)]),
        (JOB.replace("lengths: {prompt: 1024", "lengths: {prompt_mean: 2000, prompt: 1024"),
         [("lengths.prompt_mean", FaultKind.CONFLICT)]),
        (JOB.replace("precision: bf16-mixed", "precision: fp8"), [("training.precision", FaultKind.OUT_OF_RANGE)]),
        (JOB.replace("prompts: 384", f"prompts: {10**22}").replace("response: 1024", f"response: {10**9}"),
         [("batch.prompts", FaultKind.OUT_OF_RANGE), ("lengths.response", FaultKind.OUT_OF_RANGE)]),
        (JOB.replace("prompts: 384", "prompts: .nan").replace("algorithm: ppo", "algorithm: dpo"),
         [("batch.prompts", FaultKind.OUT_OF_RANGE), ("algorithm", FaultKind.OUT_OF_RANGE)]),
    ],
)  # fmt: skip
def test_bad_jobs_are_refused_with_their_faults(text: str, faults: list[tuple[str, FaultKind]]) -> None:
    assert faults_of(text, load_job) == faults


def test_verifier_reward_of_any_name_is_accepted() -> None:
    job = load_job(JOB.replace("reward: {shape: qwen3-8b}", "reward: {verifier: any-name}"), "j.yaml")
    assert job.models.reward.model_dump() == {"verifier": "any-name"}


@pytest.mark.parametrize(
    "text",
    [
        "name: &a [*a]",
        "name: &a {b: *a}",
        "name: " + "[" * 60 + "]" * 60,
        '{"name": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "name: " + "[" * 5_000 + "]" * 5_000,
        "a: &a [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]\n"
        + "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in pairwise("abcdefghij")),
    ],
    ids=["list in itself", "mapping in itself", "deep", "very deep JSON", "very deep YAML", "aliases that explode"],
)
def test_document_that_never_ends_is_refused_as_unreadable(text: str) -> None:
    for load in (load_job, load_cluster):
        with pytest.raises(SpecError, match="the document is unreadable") as caught:
            load(text, "file.yaml")
        assert [fault.kind for fault in caught.value.faults] == [FaultKind.SYNTAX]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "a host", "http://host"])
def test_address_that_is_none_of_one_machine_is_refused(address: str) -> None:
    text = f"""
format: motley.cluster/1
name: c
machines: [{{name: m, region: r, gpu: A100-80, count: 1, address: "{address}"}}]
"""
    with pytest.raises(SpecError, match=r"machines\[0\]\.address"):
        load_cluster(text, "c")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("A100", "write 'A100-40' or 'A100-80', or add"),
        ("a100-80", "write 'A100-80', or add"),
        ("H100-SXM", "write 'H100', or add"),
        ("RTX4090", "write 'RTX 4090', or add"),
        ("TPUv5", "cpu; add the type"),
    ],
)
def test_an_unknown_gpu_comes_with_the_types_that_its_name_begins(name: str, near: str) -> None:
    with pytest.raises(SpecError, match=re.escape(near)):
        load_cluster(CLUSTER.replace("gpu: L4,", f"gpu: {name},"), "c.yaml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (CLUSTER.replace("bandwidth_gbps: 5}", "bandwidth_gbps: .nan}"),
         "links.regions[0].bandwidth_gbps is nan, but numbers are finite; write a finite number."),
        (CLUSTER.replace("[virginia, ohio]", "[virginia, ohio, paris]"),
         'links.regions[0].between is ["virginia", "ohio", "paris"], but it has 2 entries at most; '
         "write an allowed value."),
        (CLUSTER.replace("zone: virginia-1", "zone: a/b"), 'machines[0].zone is "a/b", but a name begins with'),
        (CLUSTER.replace("forbidden: true", "forbidden: false"), "it should be true"),
        (CLUSTER.replace("tflops: 312", "tflops: 312, reserve_gb: 40"), "reserve_gb leaves some of memory_gb free"),
        (CLUSTER.replace('{virginia: "s3', '{virgin: "s3'), "storage.virgin is 'virgin', but a store's region is one"),
        (CLUSTER + "name: again\n", f"the key 'name' is given twice, again in line {CLUSTER.count(chr(10)) + 1}"),
    ],
)  # fmt: skip
def test_one_mistake_of_a_cluster_is_one_sentence_in_its_authors_words(text: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=re.escape(sentence)) as caught:
        load_cluster(text, "c.yaml")
    assert len(caught.value.faults) == 1


def test_a_reward_that_is_rule_and_model_is_told_to_be_one_of_them() -> None:
    text = JOB.replace("reward: {shape: qwen3-8b}", "reward: {shape: qwen3-8b, verifier: math}")
    with pytest.raises(SpecError, match="remove it, or the field that makes this another kind of entry") as caught:
        load_job(text, "j.yaml")
    assert [fault.field for fault in caught.value.faults] == ["models.reward.shape"]
    typo = JOB.replace("reward: {shape: qwen3-8b}", "reward: {verifer: math}")
    assert ("models.reward.verifer", FaultKind.UNKNOWN_FIELD) in faults_of(typo, load_job)


@pytest.mark.parametrize("text", ["[" * 100_000, "a: " + "{a: " * 100_000, "- " * 100_000])
def test_a_text_of_open_brackets_is_refused_at_once(text: str) -> None:
    with pytest.raises(SpecError, match="the document is unreadable"):
        load_cluster(text, "c.yaml")
