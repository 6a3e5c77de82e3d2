"""What is needed to start an engine process, and the identity by which a running one is found again."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from stages.engines.gang_place import GangPlace
from stages.spec.execution import Dtype, LoraSpec

Role = Literal["generation", "scoring", "training", "critic", "reward"]
"""What an engine is for; see `stages.engines.protocol`."""

WIRE_VERSION = 3
"""Version of the messages between client and host; part of the identity, so old processes are never talked to."""

SOCKET_FOLDER_PREFIX = "motley-engine-"
"""Start of the name of a private temporary folder for one socket, used where the state directory's path is too long."""


class EngineLaunch(BaseModel):
    """Everything that fixes an engine process, apart from the weights it holds at the moment."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    role: Role
    """What the engine is for."""
    name: str = Field(min_length=1)
    """Engine by registry name, e.g. `transformers`."""
    run: str = Field(min_length=1)
    """Run that the engine works for; two runs never share one."""
    machine: str = Field(min_length=1)
    """Machine of the cluster file on which it runs."""
    gpus: tuple[str, ...] = ()
    """GPU ids of the cluster file, `<machine>/<index>`; empty means CPU only."""
    gang: GangPlace | None = None
    """Engines on other machines with which this one trains; None = it trains alone."""
    replica: int = Field(default=0, ge=0)
    """Number of this engine among those of the same role on the same devices."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the process (OpenMP and torch)."""
    dtype: Dtype = "fp32"
    """Compute type."""
    max_prompt_tokens: int = Field(ge=1)
    """Longest prompt, tokens."""
    max_completion_tokens: int = Field(ge=1)
    """Longest completion, tokens."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Rows in work at once at most; bounds memory and has no influence on the tokens in fp32."""
    options: dict[str, JsonValue] = {}
    """Engine options by the engine's own names."""
    lora: LoraSpec | None = None
    """The adapters that policies of the run may be; None where they are whole."""
    idle_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds without requests after which the process ends itself."""
    hub_offline: bool = True
    """Whether hub look-ups are switched off (`HF_HUB_OFFLINE=1`)."""
    python: str = Field(default=sys.executable, min_length=1)
    """Interpreter of the environment that the engine lives in."""

    def identity(self) -> str:
        """Return the SHA-256 by which a running engine is found; the policy version is state and no part of it."""
        document = {"wire": WIRE_VERSION, **self.model_dump(mode="json")}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def device_indices(self) -> tuple[str, ...]:
        """Return the local indices of the GPUs, as `CUDA_VISIBLE_DEVICES` wants them."""
        return tuple(gpu.rpartition("/")[2] for gpu in self.gpus)

    def environment(self) -> dict[str, str]:
        """Return the variables that must stand in the process's environment before any heavy import.

        Waiting OpenMP threads must sleep: where they spin, two processes on two cores slow each other down 30 times.
        """
        threads = str(self.threads)
        return {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": ",".join(self.device_indices()),
            # Indices are those of nvidia-smi; CUDA's own order is by speed.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "HF_HUB_OFFLINE": "1" if self.hub_offline else "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }


class HostFile(BaseModel):
    """The launch file that an engine process reads: `python -m stages.engines.host --launch FILE`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    launch: EngineLaunch
    model_dir: Path
    """Directory of a model in Hugging Face format; gives architecture and tensor names."""
    folder: Path
    """Folder of this engine: record, log and failure are written there."""
    socket: Path
    """Unix domain socket to listen on."""

    @property
    def log_path(self) -> Path:
        """Log of the process (standard output and error)."""
        return self.folder / "engine.log"

    @property
    def record_path(self) -> Path:
        """Where the `EngineRecord` stands."""
        return self.folder / "engine.json"

    @property
    def failure_path(self) -> Path:
        """Where the host leaves the error (see `stages.engines.wire`) that kept it from starting."""
        return self.folder / "failure.json"


class EngineRecord(BaseModel):
    """Registry entry of a running engine process."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    identity: str
    """`EngineLaunch.identity()`."""
    launch: EngineLaunch
    model_dir: Path
    """Directory whose architecture the engine was built for."""
    architecture: dict[str, JsonValue]
    """`read_architecture` of that directory, which may be gone by now."""
    pid: int
    process_started_at: float
    """Start time of the process as the operating system has it, Unix seconds; tells a reused pid."""
    socket: Path
    log_path: Path

    def describe(self) -> str:
        """Name the process for an error message."""
        launch = self.launch
        return f"{launch.role} engine {launch.name!r} of run {launch.run!r} (pid {self.pid}, log {self.log_path})"
