"""A complete resume point of the trainer: optimizer, counts, random states, and full-precision weights where needed.

Files of a trainer directory:

- `trainer.json`: counts, the model config's hash, number of ranks.
- `optimizer.safetensors`: AdamW's moments and step counts by parameter name (`exp_avg/<name>` ...).
- `random_rank_<r>.safetensors`: random states of rank r.
- `weights.safetensors`: weights at training precision, where the policy directory holds rounded ones; of adapters
  always, and then of nothing else.

Names and shapes are those of the Hugging Face model, whatever engine and parallel layout wrote the files, so each can
go on from the others' points. Several pipeline stages write a file each: `optimizer-00001-of-00002.safetensors` ...
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.engines.training.rank_group import RankGroup
from stages.engines.training.weight_sharding import copy_whole, part_of, whole_on_cpu
from stages.errors import ContractError

FORMAT: Final = "motley.trainer/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCounts:
    """What the trainer counts over the whole run."""

    optimizer_step: int = 0
    """Next optimizer step of the run."""
    non_finite_in_a_row: int = 0
    """Optimizer steps skipped since the last good one."""


def config_hash(model: nn.Module) -> str:
    """SHA-256 of what makes two models interchangeable: class, and name, shape of every weight."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    config: Any = model.config
    content = {
        "class": type(model).__name__,
        "shapes": shapes,
        "rope": _plain(getattr(config, "rope_parameters", None)),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_trainer_files(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, counts: TrainerCounts, *, has_weights: bool,
    ranks: RankGroup, policy_version: int,
) -> None:  # fmt: skip
    """Write everything but the random states; rank 0 writes, all ranks call it together."""
    moments = {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    files = {"optimizer": moments, "weights": trained} if has_weights else {"optimizer": moments}
    for stem, tensors in files.items():
        whole = whole_on_cpu(tensors, ranks)
        if ranks.rank == 0:
            save_file(whole, directory / tensor_file_name(stem, 0, 1))
    if ranks.rank == 0:
        write_trainer_document(
            directory, counts, model_config_hash=config_hash(model), num_ranks=ranks.num_ranks,
            policy_version=policy_version,
        )  # fmt: skip


def write_trainer_document(
    directory: Path, counts: TrainerCounts, *, model_config_hash: str, num_ranks: int, policy_version: int
) -> None:
    """Write `trainer.json`."""
    document = {
        "format": FORMAT, "model_config_hash": model_config_hash, "num_ranks": num_ranks,
        "policy_version": policy_version, **asdict(counts),
    }  # fmt: skip
    (directory / "trainer.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_trainer_files(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainerCounts:
    """Restore the optimizer (and weights, if they are there) and return the counts.

    Raises:
        ContractError: Another format, another model, or missing files.
    """
    counts = read_trainer_counts(directory, config_hash(model))
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in _load_all(tensor_files(directory, "optimizer")):
        field, _, name = key.partition("/")
        parameter = parameters[name]
        # Step counts stay where AdamW's fused kernel wants them: beside the parameter, in fp32.
        is_moment = value.shape == parameter.shape
        optimizer.state[parameter][field] = part_of(value, parameter) if is_moment else value.to(parameter.device)
    for name, value in _load_all(tensor_files(directory, "weights", may_be_absent=True)):
        copy_whole(parameters[name], value)
    return counts


def read_trainer_counts(directory: Path, model_config_hash: str) -> TrainerCounts:
    """Return the counts of a resume point.

    Args:
        directory: Trainer directory.
        model_config_hash: `config_hash` of the model that is to go on.

    Raises:
        ContractError: Another format, another model, or no `trainer.json`.
    """
    document = _read_document(directory / "trainer.json")
    found = document.get("model_config_hash")
    if found != model_config_hash:
        raise ContractError(
            f"{directory} was saved from another model (config hash {found}, this model has {model_config_hash}): "
            "resume with the model of the run, or start a fresh run",
            found=found,
            expected=model_config_hash,
        )
    return TrainerCounts(
        optimizer_step=int(document["optimizer_step"]), non_finite_in_a_row=int(document["non_finite_in_a_row"])
    )


def tensor_file_name(stem: str, place: int, num_files: int) -> str:
    """Return the name of one of several files that hold a set of tensors; `place` counts from 0."""
    suffix = "" if num_files == 1 else f"-{place + 1:05d}-of-{num_files:05d}"
    return f"{stem}{suffix}.safetensors"


def tensor_files(directory: Path, stem: str, *, may_be_absent: bool = False) -> list[Path]:
    """Return the files of `optimizer` or `weights`.

    Raises:
        ContractError: Some are missing, or all unless they may be.
    """
    found = sorted(path.name for path in directory.glob(f"{stem}*.safetensors"))
    num_files = len(found) if found != [] else (0 if may_be_absent else 1)
    if found and "-of-" in found[0]:
        num_files = int(found[0].removesuffix(".safetensors").rpartition("-")[2])
    names = [tensor_file_name(stem, place, num_files) for place in range(num_files)]
    missing = sorted(set(names) - set(found))
    if missing:
        path = directory / missing[0]
        raise ContractError(f"the resume point lacks {path}: fetch the trainer directory again", path=str(path))
    return [directory / name for name in names]


def write_random_state(directory: Path, rank: int) -> None:
    """Write this rank's random states."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, _random_path(directory, rank))


def read_random_state(directory: Path, rank: int) -> bool:
    """Restore this rank's random states; False when the point was saved with fewer ranks."""
    path = _random_path(directory, rank)
    if not path.exists():
        return False
    states = load_file(path)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    return True


def _random_path(directory: Path, rank: int) -> Path:
    return directory / f"random_rank_{rank}.safetensors"


def _load_all(paths: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        yield from load_file(path).items()


def _read_document(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ContractError(f"the resume point lacks {path}: fetch the trainer directory again", path=str(path))
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT:
        raise ContractError(
            f"{path} has format {document.get('format')!r} instead of {FORMAT!r}: it isn't a trainer directory",
            path=str(path),
        )
    return document


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON of a config
    return json.loads(json.dumps(value, default=str))
