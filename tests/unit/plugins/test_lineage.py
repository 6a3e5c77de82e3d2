from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("airflow.sdk")

from plugins.lineage import dataset_namespace, made_datasets
from plugins.stage_operator import StageOperator
from stages.contract import StageName
from stages.run_entry import MachineEntry, RunEntry
from storage.layout import manifest_key, policy_folder, shard_folder
from storage.policies import publish_policy
from storage.store import Store, open_store
from tests.helpers.storage_builders import RUN, new_run, policy_files, write_iteration_data

BOX = MachineEntry(name="box", queue="q", region="here")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(str(tmp_path / "store"))
    new_run(made)
    write_iteration_data(made, 1)
    publish_policy(made, RUN, 0, policy_files(), created_by="test", is_head=True)
    return made


def shards(iteration: int) -> list[str]:
    return [manifest_key(shard_folder(RUN, iteration, "rollouts", shard)) for shard in range(2)]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:///data/rl", ("file", "/data/rl/")),
        ("s3://bucket/rl/team/", ("s3://bucket", "rl/team/")),
        ("gs://bucket", ("gs://bucket", "")),
    ],
)
def test_datasets_are_named_as_openlineage_names_files_and_buckets(url: str, expected: tuple[str, str]) -> None:
    assert dataset_namespace(url) == expected


def test_what_a_stage_made_is_what_its_manifests_say(store: Store) -> None:
    keys = [*shards(1), manifest_key(policy_folder(RUN, 0)), f"{RUN}/policies/head.json", "elsewhere", *shards(2)]
    policies, rollouts = made_datasets(store, keys)
    assert (rollouts.name, rollouts.rows, rollouts.files, rollouts.versions) == ("rollouts", 8, 2, {1, 2})
    assert (policies.name, policies.rows, policies.files, policies.versions) == ("policies", 0, 2, {0})
    assert rollouts.size_bytes == sum(info.size for info in store.list(f"{RUN}/iterations/1/rollouts") if (
        info.key.endswith("rows.parquet")))  # fmt: skip


def test_events_with_datasets_reach_a_file_through_the_client(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("airflow.providers.openlineage")
    client = pytest.importorskip("openlineage.client")
    from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
    from openlineage.client.transport.file import FileConfig, FileTransport

    entry = RunEntry(run=RUN, roots={"here": store.url}, machines=(BOX,), iterations=3)
    operator: Any = StageOperator(task_id="generate.q", entry=entry, stage=StageName.GENERATE, machine=BOX)
    assert operator.get_openlineage_facets_on_complete(None) is None
    operator._done = (1, shards(1))
    lineage = operator.get_openlineage_facets_on_complete(None)

    file = tmp_path / "events.json"
    transport = FileTransport(FileConfig(log_file_path=str(file), append=True))
    client.OpenLineageClient(transport=transport).emit(
        RunEvent(
            eventType=RunState.COMPLETE, eventTime="2026-01-01T00:00:00Z",
            run=Run(runId="0196f1a6-0000-7000-8000-000000000000"), job=Job(namespace="n", name="generate"),
            inputs=lineage.inputs, outputs=lineage.outputs,
        )
    )  # fmt: skip
    event = json.loads(file.read_text().splitlines()[0])
    (made,), (read,) = event["outputs"], event["inputs"]
    assert (made["namespace"], made["name"]) == ("file", f"{tmp_path}/store/{RUN}/rollouts")
    assert read["name"] == f"{tmp_path}/store/{RUN}/policies"
    statistics = made["outputFacets"]["outputStatistics"]
    assert (statistics["rowCount"], statistics["fileCount"]) == (8, 2)
    assert made["facets"]["version"]["datasetVersion"] == "1"
    fields = {field["name"]: field for field in made["facets"]["schema"]["fields"]}
    assert (fields["sampler_logprobs"]["type"], "nats" in fields["sampler_logprobs"]["description"]) == (
        "list<float32>", True,
    )  # fmt: skip
