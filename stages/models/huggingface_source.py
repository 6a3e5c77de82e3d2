"""Source `hf`: a directory in Hugging Face format, or the id of a model on a hub that this machine reaches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from stages.errors import DataError
from stages.models.request import MaterialiseRequest
from stages.source_tokenizer import TOKENIZER_NAME
from stages.spec.source import HuggingFaceSource

_WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def write_huggingface_model(source: HuggingFaceSource, request: MaterialiseRequest, directory: Path) -> dict[str, Any]:
    """Copy config, safetensors and tokenizer into `directory`, byte by byte.

    Returns:
        Facts: `origin`, the directory or hub snapshot copied from.

    Raises:
        DataError: Nothing is there, or something is missing; all of it is named.
    """
    del request  # the model has its own shape; the caller compares
    origin = Path(source.path).expanduser()
    if not origin.is_dir():
        origin = _download(source)
    _refuse_incomplete(origin)
    for path in sorted({path for pattern in _WANTED for path in origin.glob(pattern)}):
        shutil.copyfile(path, directory / path.name)
    return {"origin": str(origin)}


def _download(source: HuggingFaceSource) -> Path:
    try:
        return Path(snapshot_download(source.path, revision=source.revision, allow_patterns=list(_WANTED)))
    except HFValidationError:
        reason = "it is no directory on this machine"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        reason = f"it is no directory on this machine, and no hub gave it ({type(error).__name__})"
    raise DataError(
        f"source.path {source.path!r} can't be used: {reason}. Give the directory of a model in Hugging Face format "
        "(config.json, *.safetensors, tokenizer.json), or the id of a hub model on a machine that reaches the hub with "
        "HF_HUB_OFFLINE unset",
        path=source.path,
    )


def _refuse_incomplete(origin: Path) -> None:
    missing = [name for name in ("config.json", TOKENIZER_NAME) if not (origin / name).is_file()]
    if not any(origin.glob("*.safetensors")):
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in origin.glob(pattern))
        hint = f" ({others[0]} is a pickle, which is never loaded: convert it to safetensors)" if others else ""
        missing.append(f"*.safetensors{hint}")
    if missing:
        raise DataError(
            f"source.path {origin} lacks {', '.join(missing)}; give a complete model directory", path=str(origin)
        )
