"""From a training layout to a serving layout: `python -m benchmarks.train_step.reshard`; see the README.

A layout's ranks write serving weights as every iteration does (`save`, without moments). Each rank of a serving layout
then reads its own slices of the files and nothing else, and what it holds is compared with what it would hold of the
model that training started from, byte for byte. The serving ranks read one after the other in one process; on machines
of their own they read at once, so the slowest counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.planner.record import markdown, write_result
from benchmarks.train_step.compare import RESULTS
from benchmarks.train_step.side_processes import tree_cpu_s
from plans.spec.llm import LlmShape
from stages.engines.launch import EngineLaunch
from stages.engines.megatron.layout import MegatronLayout
from stages.engines.megatron.model_config import ModelConfig, read_model_config
from stages.engines.megatron.weight_io import TensorFiles, local_tensor
from stages.engines.megatron.weight_map import stage_parameters
from stages.engines.registry import engine_factory
from stages.engines.weight_files import weight_files
from stages.models.random_model import make_random_model

SHAPE = LlmShape(layers=8, hidden=768, intermediate=2048, heads=12, kv_heads=4, head_dim=64, vocab=16384, tied=True)
TRAINING = ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1), (4, 1, 1))
"""(tensor, pipeline, data) parallel degrees of up to four ranks."""
SERVING = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
"""(tensor, pipeline) parallel degrees."""
COLUMNS = ("training TP,PP,DP", "write GB/s", "serving TP,PP", "read GB/s, slowest rank", "most read by a rank, share",
           "both, GB/s")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Serving weights as a training layout wrote them."""

    directory: Path
    wall_s: Sequence[float]
    cpu_s: Sequence[float]


def main() -> None:
    """Measure every pair and record it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-ranks", type=int, default=4, help="leave training layouts with more ranks out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    data = []
    with tempfile.TemporaryDirectory() as name:
        model_dir = Path(name) / "model"
        make_random_model("qwen3", SHAPE, SHAPE.vocab, seed=0).save_pretrained(model_dir)
        for tp, pp, dp in [degrees for degrees in TRAINING if _product(degrees) <= given.most_ranks]:
            written = write(model_dir, (tp, pp, dp), Path(name) / f"{tp}-{pp}-{dp}", given.repeats)
            _check_whole(written.directory, model_dir)
            data += [pair(written, model_dir, (tp, pp, dp), serving, given.repeats) for serving in SERVING]
    table = markdown(COLUMNS, [[row[key] for key in _FIELDS] for row in data])
    settings = {
        "dtype": "fp32", "repeats": given.repeats, "tolerance": "byte for byte", "model_bytes": data[0]["model_bytes"],
    }  # fmt: skip
    write_result("reshard", settings, data, table, out=given.out)


_FIELDS = ("training", "write_gb_per_s", "serving", "read_gb_per_s", "most_read_share", "both_gb_per_s")


def write(model_dir: Path, degrees: tuple[int, int, int], folder: Path, repeats: int) -> Written:
    """Let the ranks of a training layout write serving weights; keeps those of the last repeat."""
    folder.mkdir()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, model_dir, degrees, folder))
    process.start()
    theirs.close()
    ours.recv()
    wall, cpu = [], []
    for repeat in range(repeats):
        before, started_at = tree_cpu_s([process.pid]), time.perf_counter()
        ours.send(repeat)
        ours.recv()
        wall.append(time.perf_counter() - started_at)
        cpu.append(tree_cpu_s([process.pid]) - before)
    ours.close()
    process.join()
    return Written(directory=folder / f"policy-{repeats - 1}", wall_s=wall, cpu_s=cpu)


def pair(
    written: Written, model_dir: Path, training: tuple[int, int, int], serving: tuple[int, int], repeats: int
) -> dict[str, Any]:
    """Return what re-sharding between two layouts takes, once each rank's bytes have been proved."""
    config = read_model_config(model_dir)
    layout = _layout(*serving, 1)
    num_bytes = sum(value.nbytes for value in _tensors(model_dir).values())
    ranks = []
    for rank in range(layout.num_ranks):
        _check_rank(config, layout, rank, written.directory, model_dir)
        ranks.append(_read(config, layout, rank, written.directory, repeats))
    write_s, slowest_s = median(written.wall_s), max(rank["wall_s"] for rank in ranks)
    return {
        "training": ",".join(map(str, training)), "serving": ",".join(map(str, serving)), "model_bytes": num_bytes,
        "write_wall_s": write_s, "write_cpu_s": median(written.cpu_s), "write_gb_per_s": num_bytes / write_s / 1e9,
        "read_wall_s": slowest_s, "read_cpu_s": sum(rank["cpu_s"] for rank in ranks),
        "read_gb_per_s": min(rank["num_bytes"] / rank["wall_s"] for rank in ranks) / 1e9,
        "most_read_share": max(rank["num_bytes"] for rank in ranks) / num_bytes,
        "both_gb_per_s": num_bytes / (write_s + slowest_s) / 1e9,
    }  # fmt: skip


def _serve(connection: Connection, model_dir: Path, degrees: tuple[int, int, int], folder: Path) -> None:
    """Be the engine of a training layout; write serving weights as often as asked."""
    layout = _layout(*degrees)
    launch = EngineLaunch(
        role="training", name="megatron", run="benchmark", machine="here", dtype="fp32",
        max_prompt_tokens=8, max_completion_tokens=8,
        options={
            "tensor_parallel": layout.tp, "stage_layers": list(layout.stage_layers),
            "replica_samples": list(layout.shares),
        },
    )  # fmt: skip
    engine: Any = engine_factory("training", "megatron")(launch, model_dir)
    engine.load_checkpoint(model_dir, None, 0, "start")
    connection.send("ready")
    while True:
        try:
            repeat = connection.recv()
        except EOFError:
            break
        engine.save(folder / f"policy-{repeat}", folder / f"trainer-{repeat}", repeat)
        connection.send("written")
    engine.close()


def _layout(tp: int, pp: int, dp: int) -> MegatronLayout:
    """Return a layout whose stages are uneven where there are several."""
    first = SHAPE.layers - (pp - 1) * (SHAPE.layers // (pp + 1))
    rest = (SHAPE.layers // (pp + 1),) * (pp - 1)
    return MegatronLayout(tp=tp, stage_layers=(first, *rest), shares=(1,) * dp)


def _shards(config: ModelConfig, layout: MegatronLayout, rank: int, files: TensorFiles) -> Iterator[torch.Tensor]:
    at = layout.coordinates(rank)
    for mapped in stage_parameters(config, layout, at.stage):
        yield local_tensor(files, mapped, config, at.shard, layout.tp)


def _read(config: ModelConfig, layout: MegatronLayout, rank: int, directory: Path, repeats: int) -> dict[str, Any]:
    wall, cpu, num_bytes = [], [], 0
    for _ in range(repeats):
        cpu_s, started_at = time.process_time(), time.perf_counter()
        with TensorFiles(weight_files(directory)) as files:
            # A copy: what safetensors gives may be a view of the mapped file, whose pages nobody has read yet.
            num_bytes = sum(shard.clone().nbytes for shard in _shards(config, layout, rank, files))
        wall.append(time.perf_counter() - started_at)
        cpu.append(time.process_time() - cpu_s)
    return {"num_bytes": num_bytes, "wall_s": median(wall), "cpu_s": median(cpu)}


def _check_rank(config: ModelConfig, layout: MegatronLayout, rank: int, written: Path, source: Path) -> None:
    with TensorFiles(weight_files(written)) as ours, TensorFiles(weight_files(source)) as theirs:
        pairs = zip(_shards(config, layout, rank, ours), _shards(config, layout, rank, theirs), strict=True)
        if not all(left.dtype == right.dtype and torch.equal(left, right) for left, right in pairs):
            raise RuntimeError(f"rank {rank} of {layout} reads other bytes from {written} than from {source}")


def _check_whole(written: Path, source: Path) -> None:
    ours, theirs = _tensors(written), _tensors(source)
    if sorted(ours) != sorted(theirs) or not all(torch.equal(ours[name], theirs[name]) for name in ours):
        raise RuntimeError(f"{written} holds other tensors than {source}")


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in weight_files(directory) for name, value in load_file(path).items()}


def _product(degrees: Sequence[int]) -> int:
    tp, pp, dp = degrees
    return tp * pp * dp


if __name__ == "__main__":
    main()
