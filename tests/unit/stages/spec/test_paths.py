"""Local paths of job and cluster files are those of the file that names them, wherever a stage runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.runs import ResolvedRun, create_run, load_run, resolve_run
from stages.spec.source import GgufSource, HuggingFaceSource
from tests.helpers.stage_contexts import JOB

CLUSTER = """
format: motley.cluster/1
name: one
machines: [{name: local, region: here, gpu: cpu, count: 1}]
"""
INIT = JOB[JOB.index("source:") : JOB.index("data:")]


def _resolve(tmp_path: Path, job: str, cluster: str = CLUSTER) -> ResolvedRun:
    return resolve_run(
        job, cluster, "r", None, None, str(tmp_path / "default"), job_folder=tmp_path / "jobs",
        cluster_folder=tmp_path / "clusters",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("written", "resolved"),
    [
        ("rows.jsonl", "{jobs}/rows.jsonl"),
        ("../rows.parquet", "{jobs}/../rows.parquet"),
        ("/data/rows.ndjson", "/data/rows.ndjson"),
        ("s3://bucket/rows.jsonl", "s3://bucket/rows.jsonl"),
        ("hf:./set", "hf:{jobs}/set"),
        ("hf:org/set", "hf:org/set"),
        ("reasoning-gym:chain_sum", "reasoning-gym:chain_sum"),
    ],
)
def test_dataset_path_is_relative_to_the_job_file(tmp_path: Path, written: str, resolved: str) -> None:
    run = _resolve(tmp_path, JOB.replace('source: "arithmetic:addition"', f"source: '{written}'"))
    assert run.job.data.source == resolved.format(jobs=tmp_path / "jobs")


@pytest.mark.parametrize(
    ("written", "resolved"),
    [
        ("{type: hf, path: ./model}", "{jobs}/model"),
        ("{type: hf, path: org/model}", "org/model"),
        ("{type: gguf, path: model.gguf}", "{jobs}/model.gguf"),
        ("{type: gguf, path: ~/model.gguf}", str(Path.home() / "model.gguf")),
    ],
)
def test_model_path_is_relative_to_the_job_file_and_a_hub_id_is_none(
    tmp_path: Path, written: str, resolved: str
) -> None:
    source = _resolve(tmp_path, JOB.replace(INIT, f"source: {written}\n")).job.source
    assert isinstance(source, GgufSource | HuggingFaceSource)
    assert source.path == resolved.format(jobs=tmp_path / "jobs")


def test_stores_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    job = (
        JOB.replace("storage: {", "storage: {root: store, ")
        if "storage: {" in JOB
        else JOB + "\nstorage: {root: store}\n"
    )
    assert _resolve(tmp_path, job).roots == {"here": str(tmp_path / "jobs/store")}
    cluster = CLUSTER + "storage: {here: data}\n"
    assert _resolve(tmp_path, job, cluster).roots == {"here": str(tmp_path / "clusters/data")}
    cluster = CLUSTER + "storage: {here: 's3://bucket/x'}\n"
    assert _resolve(tmp_path, job, cluster).roots == {"here": "s3://bucket/x"}


def test_run_record_keeps_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _resolve(tmp_path, JOB.replace('source: "arithmetic:addition"', "source: rows.jsonl"))
    create_run(run)
    monkeypatch.chdir("/")
    loaded = load_run(run.home_root, "r")
    assert loaded.job.data.source == str(tmp_path / "jobs/rows.jsonl")
    assert loaded.job.fingerprint == run.job.fingerprint
