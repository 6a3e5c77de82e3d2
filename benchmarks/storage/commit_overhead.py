"""What committing an artefact costs on a local disk beyond writing its bytes there durably, alternating in one run.

`python -m benchmarks.storage.commit_overhead --repeats 40 --folder DIR`. The raw side writes the same parts as files,
with fsync of files and folder. 50 ms and less is the goal.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

from benchmarks.storage.record import write_result
from storage.manifest import PartSource, commit
from storage.store import Store, open_store


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--kilobytes", type=int, default=256, help="of each part")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: the temporary one")
    given = parser.parse_args()
    parts = {f"part-{number}.bin": os.urandom(given.kilobytes << 10) for number in range(given.parts)}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        data = measure(parts, Path(name), given.repeats)
    settings = {"repeats": given.repeats, "parts": given.parts, "kilobytes": given.kilobytes}
    write_result("commit_overhead", settings, data)


def measure(parts: dict[str, bytes], folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of both sides and of what commits take more."""
    store = open_store(str(folder / "store"))
    raw, ours = list[tuple[float, float]](), list[tuple[float, float]]()
    for number in range(repeats):
        raw.append(_timed(lambda number=number: _write_raw(parts, folder / "raw" / str(number))))
        ours.append(_timed(lambda number=number: _commit(store, parts, number)))
    result = {}
    for place, kind in enumerate(("cpu", "wall")):
        more = [1e3 * (mine[place] - theirs[place]) for mine, theirs in zip(ours, raw, strict=True)]
        result[kind] = {
            "raw_ms": 1e3 * median(one[place] for one in raw),
            "commit_ms": 1e3 * median(one[place] for one in ours),
            "overhead_ms": median(more),
            "overhead_p90_ms": quantiles(more, n=10)[-1],
        }
    return result


def _commit(store: Store, parts: dict[str, bytes], number: int) -> None:
    sources = {name: PartSource(data) for name, data in parts.items()}
    commit(store, f"bench/iterations/{number}/x", sources, kind="x", input_fingerprint="f" * 64, created_by="bench")


def _write_raw(parts: dict[str, bytes], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, data in parts.items():
        with (folder / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    number = os.open(folder, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def _timed(action: Callable[[], None]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    main()
