"""In which iterations a prompt was sampled: one column of the rollouts, read with the filter pushed down."""

from __future__ import annotations

from collections.abc import Iterable

from storage.arrow_files import dataset_of
from storage.iterations import find_shards
from storage.layout import Split
from storage.rollout_schema import Family, arrow_schema
from storage.store import Store


def iterations_with_prompt(
    store: Store, run: str, iterations: Iterable[int], split: Split | str, prompt: str
) -> list[int]:
    """Return the iterations, ascending, whose committed rollouts hold a prompt.

    Args:
        store: Where.
        run: Run name.
        iterations: Where to look (split eval: policy versions).
        split: Train or eval.
        prompt: Prompt id.

    Raises:
        ObjectMissingError: A file that a manifest names is gone.
    """
    import pyarrow.compute as pc

    manifests = find_shards(store, run, Family.ROLLOUTS, split, iterations)
    keys = [part.path for manifest in manifests for part in manifest.parts]
    if not keys:
        return []
    rows = dataset_of(store, keys, arrow_schema(Family.ROLLOUTS))
    found = rows.to_table(columns=["iteration"], filter=pc.field("prompt_id") == prompt)
    return sorted(set(found.column("iteration").to_pylist()))
