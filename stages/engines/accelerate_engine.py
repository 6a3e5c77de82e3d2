"""Training engine on transformers and accelerate: one process, or several ranks on this machine.

Also scores rows (reference log-probs, canary). The process that makes the engine is rank 0; further ranks are its
children. Every method is one call that all ranks run together; see `stages.engines.training.rank_processes` for what
happens when one of them fails.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from stages.engines.protocol import EngineInfo, ScoredTokens, TrainingOutcome, TrainingRequest
from stages.engines.training.engine_options import settings_from
from stages.engines.training.rank_processes import RankCall, RankProcesses
from stages.engines.training.rank_trainer import Precision, RankTrainer
from stages.engines.training.ranks import RankPlace
from stages.engines.training.request_checks import check_rows, check_training_request
from stages.errors import EngineError, EngineUnavailableError, StageError


class AccelerateEngine:
    """Implements `TrainingEngine` and `ScoringEngine`."""

    def __init__(
        self,
        *,
        model_dir: Path,
        precision: Precision = "fp32",
        recompute: Literal["full", "none"] = "none",
        device: Literal["cpu", "cuda"] = "cpu",
        threads: int = 1,
        num_processes: int = 1,
        seed: int = 0,
        max_sequence_tokens: int = 4096,
        options: dict[str, JsonValue] | None = None,
    ) -> None:
        """Load the model on every rank.

        Args:
            model_dir: Hugging Face directory: config, safetensors, tokenizer.
            precision: See `TrainerSettings.precision`.
            recompute: `full` recomputes activations in the backward pass.
            device: Device type of every rank; with `cuda`, rank r uses device r.
            threads: Torch threads per rank.
            num_processes: Number of ranks.
            seed: Seed of the engine's random numbers.
            max_sequence_tokens: Longest prompt and completion together.
            options: See `stages.engines.training.engine_options`.

        Raises:
            SpecFaults: An unknown or wrong option.
            EngineError: The model can't be loaded.
        """
        self._settings, timeout_s = settings_from(model_dir, precision, recompute, device, threads, seed, options or {})
        self._max_sequence_tokens = max_sequence_tokens
        self._policy_version: int | None = None
        self._weights_hash: str | None = None
        self._failure: str | None = None
        self._children: RankProcesses | None = None
        if num_processes > 1:
            self._children = RankProcesses(self._settings, num_processes, timeout_s)
        try:
            self._trainer = self._start()
        except Exception:  # whatever it is, no child may outlive it
            if self._children is not None:
                self._children.kill()
            raise

    def info(self) -> EngineInfo:
        """Describe the engine and the weights it holds."""
        return EngineInfo(
            name="accelerate",
            version=version("accelerate"),
            dtype="fp32" if self._settings.precision == "fp32" else "bf16",
            device=self._settings.device,
            logprob_mode="processed",
            is_batch_invariant=self._settings.precision == "fp32",
            policy_version=self._policy_version,
            weights_hash=self._weights_hash,
        )

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of the ranks other than this process."""
        return [] if self._children is None else self._children.pids

    def load_weights(self, directory: Path, policy_version: int, weights_hash: str) -> None:
        """Replace the weights in place; optimizer and counts start anew."""
        self._forget_identity()
        self._call("load_weights", str(directory))
        self._policy_version, self._weights_hash = policy_version, weights_hash

    def load_checkpoint(
        self, policy_dir: Path, trainer_dir: Path | None, policy_version: int, weights_hash: str
    ) -> None:
        """Take weights, and optimizer, random states and counts; None = a fresh optimizer at step 0.

        In fp32 with one rank, training goes on bit for bit as if it had not stopped.
        """
        self._forget_identity()
        self._call("load_checkpoint", str(policy_dir), None if trainer_dir is None else str(trainer_dir))
        self._policy_version, self._weights_hash = policy_version, weights_hash

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Log-prob of each completion token, at the row's temperature. [rows][completion tokens]"""
        self._check_alive()
        check_rows(rows, vocab_size=self._trainer.vocab_size, max_sequence_tokens=self._max_sequence_tokens)
        scores: list[list[float]] = self._call("score", list(rows))
        return scores

    def train(self, request: TrainingRequest) -> TrainingOutcome:
        """Make the optimizer steps of one iteration.

        Rows of later optimizer steps get their log-probs under the starting weights from a pass of their own; rows of
        the first step get them from that step's own forward pass, so a single on-policy step costs one pass.

        Raises:
            ContractError: The request can't be trained on; lists every fault.
            NumericsError: Too many non-finite steps in a row; `row_ids` names their rows.
        """
        self._check_alive()
        check_training_request(
            request, vocab_size=self._trainer.vocab_size, max_sequence_tokens=self._max_sequence_tokens
        )
        self._forget_identity()
        outcome: TrainingOutcome = self._call("train", request)
        return outcome

    def save(self, policy_dir: Path, trainer_dir: Path, policy_version: int) -> None:
        """Write serving weights and a complete resume point into two fresh directories."""
        self._call("save", str(policy_dir), str(trainer_dir), policy_version)
        self._policy_version = policy_version

    def close(self) -> None:
        """End all ranks and free everything."""
        if self._failure is None:
            self._failure = "it was closed"
            self._trainer.close()
            if self._children is not None:
                self._children.close()

    def _start(self) -> RankTrainer:
        if self._children is None:
            return RankTrainer(self._settings, RankPlace())
        try:
            trainer = RankTrainer(self._settings, self._children.place, self._children.store)
        except Exception as error:  # noqa: BLE001 - the children say what it means
            raise self._children.explain(error, time.monotonic()) or error from error
        self._children.join()
        return trainer

    def _forget_identity(self) -> None:
        self._policy_version, self._weights_hash = None, None

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineUnavailableError(f"the training engine can't be used: {self._failure}; start a new one")

    def _call(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401 - arguments and result of a RankTrainer method
        self._check_alive()
        try:
            return self._run_on_all_ranks(method, arguments)
        except StageError as error:
            if not isinstance(error, (EngineError, EngineUnavailableError)) and method != "load_weights":
                raise
            self._break(error)
            raise
        except Exception as error:
            self._break(error)
            raise EngineError(
                f"{method} failed in the training engine: {type(error).__name__}: {error}", rank=0
            ) from error

    def _run_on_all_ranks(self, method: str, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401 - see _call
        if self._children is None:
            return getattr(self._trainer, method)(*arguments)
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
        self._failure = f"it failed before ({type(error).__name__}: {error})"
        if self._children is not None:
            self._children.kill()
        self._trainer.close()
