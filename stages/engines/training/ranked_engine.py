"""A training engine of one process, or of several ranks on this machine or on several.

The process that makes the engine is the first rank of its machine; further ranks are its children. Every method is one
call that all ranks run together; see `stages.engines.training.rank_processes` for what happens when one of them fails.
In a gang each machine has such an engine, and their ranks form one group: its engines agree on each call before any
rank begins it (`stages.engines.training.gang_calls`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.engines.adapter_files import validate_adapter
from stages.engines.architecture import unfit_directory
from stages.engines.engine_state import WeightState
from stages.engines.launch import EngineLaunch
from stages.engines.protocol import AdapterBase, EngineInfo
from stages.engines.training.engine_options import AccelerateOptions, accelerate_settings, num_ranks_of, parse_options
from stages.engines.training.gang_calls import GangCalls
from stages.engines.training.rank_model import TrainerSettings
from stages.engines.training.rank_place import RankPlace
from stages.engines.training.rank_processes import RankCall, RankProcesses
from stages.engines.training.rank_store import meeting_place
from stages.engines.training.trainer_kinds import Trainer, TrainerKind, trainer_class
from stages.engines.weight_files import validate_weights
from stages.errors import ContractError, DeadlineError, EngineError, EngineUnavailableError, NumericsError


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksWanted:
    """The ranks of an engine."""

    settings: TrainerSettings
    """What each rank is told."""
    num_ranks: int
    """How many there are."""
    timeout_s: float
    """Longest wait of one rank for another."""


class RankedEngine:
    """What training engines share: ranks, calls, weights; this one's ranks run accelerate."""

    kind: TrainerKind = "policy"
    """Which trainer its ranks run."""
    name: str = "accelerate"
    """Registry name."""
    distribution: str = "accelerate"
    """Package whose version the engine reports."""

    def __init__(self, launch: EngineLaunch, model_dir: Path) -> None:
        """Load the model on every rank.

        Args:
            launch: Threads per rank, GPUs (the r-th rank here uses the r-th), longest rows, options, the gang.
            model_dir: Hugging Face directory: config, safetensors, tokenizer.

        Raises:
            SpecFaultsError: An unknown or wrong option.
            EngineError: The model can't be loaded, on some rank.
            EngineUnavailableError: No such device, or a rank died.
        """
        wanted = self._ranks_wanted(launch, model_dir)
        self._settings = wanted.settings
        self._max_sequence_tokens = launch.max_prompt_tokens + launch.max_completion_tokens
        self.weights = WeightState(self.name)
        self._is_closed = False
        self._children: RankProcesses | None = None
        self._gang: GangCalls | None = None
        if wanted.num_ranks > 1:
            place = meeting_place(launch, wanted.num_ranks, wanted.timeout_s)
            self._children = RankProcesses(self._settings, place, self.kind)
        try:
            if launch.gang is not None and self._children is not None:
                self._gang = GangCalls(self._children.place, launch.gang.machines, launch.machine)
            self._trainer = self._start()
        except BaseException:
            # Whatever it is, no child may outlive it.
            if self._children is not None:
                self._children.kill()
            raise

    def _ranks_wanted(self, launch: EngineLaunch, model_dir: Path) -> RanksWanted:
        """Read the options of a launch."""
        options = parse_options(launch, AccelerateOptions)
        return RanksWanted(
            settings=accelerate_settings(launch, options, model_dir),
            num_ranks=num_ranks_of(launch, options),
            timeout_s=options.rank_timeout_s,
        )

    def info(self) -> EngineInfo:
        """Describe the engine and the weights it holds."""
        return EngineInfo(
            name=self.name,
            version=version(self.distribution),
            dtype="fp32" if self._settings.precision == "fp32" else "bf16",
            device=self._settings.device,
            logprob_mode="processed",
            is_batch_invariant=self._settings.precision == "fp32",
            policy_version=self.weights.policy_version,
            weights_hash=self.weights.weights_hash,
        )

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of the ranks other than this process."""
        return [] if self._children is None else self._children.pids

    def load_checkpoint(
        self,
        policy_dir: Path,
        trainer_dir: Path | None,
        policy_version: int,
        weights_hash: str,
        base: AdapterBase | None = None,
    ) -> None:
        """Take weights, and optimizer, random states and counts; None = a fresh optimizer at step 0.

        In fp32 with one rank, training goes on bit for bit as if it had not stopped. With a base, `policy_dir` holds
        an adapter on it.

        Raises:
            EngineError: `policy_dir` isn't a complete directory of this model; the engine stays as it was.
            ContractError: `trainer_dir` belongs to another model; the engine can't be used any more.
        """
        self.weights.require_usable()
        whole_dir = policy_dir if base is None else base.directory
        validate_weights(whole_dir, self._trainer.expected_shapes(), self._trainer.tied_names())
        resume = None if trainer_dir is None else str(trainer_dir)
        if base is None:
            with self.weights.replacing(policy_version, weights_hash):
                self._call("load_checkpoint", str(policy_dir), resume)
            return
        self._validate_adapter(policy_dir)
        with self.weights.replacing(policy_version, weights_hash):
            self._call("load_adapter_checkpoint", base, str(policy_dir), resume)

    def _validate_adapter(self, directory: Path) -> None:
        """Raise `EngineError` unless a directory holds an adapter of the launch's kind."""
        if self._settings.lora is None:
            raise unfit_directory(directory, "it holds an adapter, but this engine was started for whole weights")
        validate_adapter(directory, self._settings.lora, self._trainer.expected_shapes())

    def save(self, policy_dir: Path, trainer_dir: Path, policy_version: int) -> None:
        """Write serving weights and a complete resume point into two fresh directories.

        Raises:
            ContractError: One of them exists already.
        """
        self.weights.require_usable()
        existing = [str(path) for path in (policy_dir, trainer_dir) if path.exists()]
        if existing:
            raise ContractError(
                f"save writes fresh directories only, {' and '.join(existing)} exist(s)", paths=existing
            )
        self._call("save", str(policy_dir), str(trainer_dir), policy_version)
        self.weights.policy_version = policy_version

    def close(self) -> None:
        """End all ranks and free everything."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.weights.unusable_reason is None:
            self.weights.give_up("it was closed")
        self._trainer.close()
        if self._children is not None:
            self._children.close()

    def _start(self) -> Trainer:
        if self._children is None:
            return trainer_class(self.kind)(self._settings, RankPlace())
        try:
            trainer = trainer_class(self.kind)(self._settings, self._children.place, self._children.store)
        except Exception as error:
            raise self._children.explain(error, time.monotonic()) or error from error
        self._children.join()
        return trainer

    def _call(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401 - arguments and result of a trainer method
        try:
            return self._run_on_all_ranks(method, arguments)
        except (ContractError, NumericsError):
            # All ranks raise these together, at the same point.
            raise
        except (EngineError, EngineUnavailableError, DeadlineError) as error:
            self._break(error)
            raise
        except Exception as error:
            self._break(error)
            cause = f"{type(error).__name__}: {error}"
            rank = 0 if self._children is None else self._children.place.rank
            raise EngineError(f"{method} failed in the training engine: {cause}", rank=rank, cause=cause) from error

    def _run_on_all_ranks(self, method: str, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401 - see _call
        if self._children is None:
            return getattr(self._trainer, method)(*arguments)
        if self._gang is not None:
            self._gang.agree(method, arguments)
        self._children.send(RankCall(method=method, arguments=arguments))
        try:
            result = getattr(self._trainer, method)(*arguments)
        except Exception as error:
            meaning = self._children.explain(error, time.monotonic())
            if meaning is None:
                raise
            raise meaning from error
        self._children.join()
        return result

    def _break(self, error: Exception) -> None:
        """A failure that leaves the ranks at different points: nothing of the engine can be trusted any more."""
        self.weights.give_up(f"it failed before ({type(error).__name__}: {error})")
        if self._children is not None:
            self._children.kill()
