"""Source `hf:<dataset id>`: a dataset of the Hugging Face hub, or of its local cache (optional package `datasets`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stages.data.file_source import rows_of_records
from stages.data.source import RawRow
from stages.data.spec import DataSpec
from stages.errors import DataError

_OPTIONS: Final = frozenset({"name", "split", "revision"})


def hf_rows(spec: DataSpec, dataset_id: str) -> Iterator[RawRow]:
    """Rows of one split (`config.split`, default train) at `config.revision`.

    Raises:
        DataError: The package is missing, an option is unknown, the dataset can't be loaded, or columns are missing.
    """
    unknown = sorted(set(spec.config) - _OPTIONS)
    if unknown:
        raise DataError(f"data.config {unknown} is unknown for hf: sources; allowed: {', '.join(sorted(_OPTIONS))}")
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data.source hf:{dataset_id} needs the package datasets: install Motley's extra datasets ({error})"
        ) from error
    options = {"split": "train", **spec.config}
    try:
        dataset = datasets.load_dataset(dataset_id, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"data.source hf:{dataset_id} with {options} can't be loaded: {error}") from error
    yield from rows_of_records(dataset, spec, f"hf:{dataset_id}")
