"""OpenLineage: which datasets a stage read and made, with schema, sizes and version.

Airflow's OpenLineage provider asks every operator; nothing here is imported without it. A dataset is a column family of
a run (or its policies) in the region's store; its version is the iteration. What a stage made is what it committed: the
facts come from the manifests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from stages.contract import StageName
from storage.errors import InvalidNameError, StorageError
from storage.layout import Split
from storage.manifest import load_manifest
from storage.parsed_keys import Kind, parse_key
from storage.rollout_schema import COLUMNS, Family
from storage.store import Store

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

#: Datasets that a stage reads, by stage.
READ: Final[Mapping[StageName, Sequence[str]]] = {
    StageName.GENERATE: ("policies",),
    StageName.INFER: ("rollouts",),
    StageName.REWARD_INFERENCE: ("rollouts",),
    StageName.REFERENCE_INFERENCE: ("rollouts",),
    StageName.CRITIC_INFERENCE: ("rollouts", "critics"),
    StageName.TRAIN: ("rollouts", "reward", "reference", "policies"),
    StageName.CRITIC_TRAINING: ("rollouts", "reward", "values", "critics"),
    StageName.EVALUATE: ("policies",),
    StageName.REPORT: ("rollouts", "reward", "training"),
}

_VERSIONED: Final = {Kind.POLICY: "policies", Kind.CRITIC: "critics", Kind.CHECKPOINT: "resume_points"}


@dataclass(kw_only=True, slots=True)
class MadeDataset:
    """What a stage committed of one dataset."""

    name: str
    """Family or kind."""
    rows: int = 0
    """Rows; 0 for what has none."""
    size_bytes: int = 0
    """Bytes."""
    files: int = 0
    """Data objects."""
    versions: set[int] = field(default_factory=set)
    """Iterations or policy versions."""


def made_datasets(store: Store, keys: Iterable[str]) -> list[MadeDataset]:
    """Return what the manifests say of a stage's artefacts, by dataset; keys that are no manifests are left out."""
    found: dict[str, MadeDataset] = {}
    for key in keys:
        try:
            parsed = parse_key(key)
        except InvalidNameError:
            continue
        shard = parsed.family if parsed.split is Split.TRAIN else f"eval_{parsed.family}"
        name = shard if parsed.kind is Kind.SHARD else _VERSIONED.get(parsed.kind)
        if name is None or parsed.is_data or parsed.number is None:
            continue
        made = found.setdefault(name, MadeDataset(name=name))
        made.versions.add(parsed.number)
        try:
            manifest = load_manifest(store, key.rpartition("/")[0])
        except StorageError:
            continue  # retention was quicker
        made.size_bytes += manifest.size
        made.files += len(manifest.parts)
        made.rows += sum(part.rows or 0 for part in manifest.parts)
    return [found[name] for name in sorted(found)]


def stage_lineage(store: Store, run: str, stage: StageName, iteration: int, keys: Iterable[str]) -> OperatorLineage:
    """Return the lineage of a stage of an iteration.

    Args:
        store: Store of the region in which the stage ran.
        run: Run name.
        stage: The stage.
        iteration: RL iteration.
        keys: Artefacts that the stage committed or found committed.
    """
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import Dataset, InputDataset, OutputDataset

    namespace, prefix = dataset_namespace(store.url)
    made = made_datasets(store, keys)
    outputs: list[Dataset] = [
        OutputDataset(
            namespace=namespace,
            name=f"{prefix}{run}/{item.name}",
            facets=_facets(item.name, store.url, max(item.versions)),
            outputFacets=_output_facets(item),
        )
        for item in made
    ]
    inputs: list[Dataset] = [
        InputDataset(
            namespace=namespace, name=f"{prefix}{run}/{name}", facets=_facets(name, store.url, iteration)
        )
        for name in READ.get(stage, ())
    ]  # fmt: skip
    return OperatorLineage(inputs=inputs, outputs=outputs)


def dataset_namespace(url: str) -> tuple[str, str]:
    """Return namespace and name prefix of the datasets below a root, as OpenLineage names them.

    >>> dataset_namespace("s3://bucket/rl/team"), dataset_namespace("file:///data/rl")
    (('s3://bucket', 'rl/team/'), ('file', '/data/rl/'))
    """
    protocol, _, rest = url.partition("://")
    if protocol in ("file", "local"):
        return "file", f"{rest.rstrip('/')}/"
    bucket, _, path = rest.partition("/")
    return f"{protocol}://{bucket}", f"{path.rstrip('/')}/" if path else ""


def _facets(name: str, uri: str, version: int) -> dict[str, Any]:
    from openlineage.client.facet_v2 import dataset_version_dataset, datasource_dataset, schema_dataset

    facets: dict[str, Any] = {
        "version": dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=str(version)),
        "dataSource": datasource_dataset.DatasourceDatasetFacet(name="motley", uri=uri),
    }
    family = name.removeprefix("eval_")
    if family in set(Family):
        facets["schema"] = schema_dataset.SchemaDatasetFacet(
            fields=[
                schema_dataset.SchemaDatasetFacetFields(name=column.name, type=column.type, description=column.meaning)
                for column in COLUMNS[Family(family)]
            ]
        )
    return facets


def _output_facets(item: MadeDataset) -> dict[str, Any]:
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

    facet = statistics.OutputStatisticsOutputDatasetFacet(
        rowCount=item.rows or None, size=item.size_bytes, fileCount=item.files
    )
    return {"outputStatistics": facet}
