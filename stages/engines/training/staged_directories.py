"""Directories that appear at once, when every rank has written its part."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.engines.training.collected_files import collect_files
from stages.engines.training.rank_group import RankGroup
from stages.errors import ContractError


@contextmanager
def staged_directories(final: tuple[Path, Path], ranks: RankGroup) -> Iterator[tuple[Path, Path]]:
    """Directories beside the final ones, renamed by rank 0 when all ranks have written; removed on failure.

    Every machine has such directories; the final ones are rank 0's machine's only, with the files of all.

    Raises:
        ContractError: A final directory exists already.
    """
    staged = (final[0].with_name(f".{final[0].name}.partial"), final[1].with_name(f".{final[1].name}.partial"))
    if ranks.is_first_here:
        for path, stage in zip(final, staged, strict=True):
            if path.exists():
                raise ContractError(f"{path} exists already: save writes fresh directories only", path=str(path))
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir(parents=True)
    ranks.barrier()
    try:
        yield staged
        ranks.barrier()
        collect_files(staged, ranks)
        if ranks.rank == 0:
            for path, stage in zip(final, staged, strict=True):
                stage.rename(path)
        ranks.barrier()
    finally:
        if ranks.is_first_here:
            for stage in staged:
                shutil.rmtree(stage, ignore_errors=True)
