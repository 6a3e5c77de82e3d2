"""Reward models: Hugging Face sequence classifiers with one output, in plain torch on any device.

The score is read at the completion's last token. Rows are padded on the right, where a causal model's real tokens never
look, so no mask is needed; the token ids are the sampled ones, never re-tokenised text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.initialization import no_init_weights

from stages.engines.architecture import read_architecture, require_same_architecture
from stages.engines.causal_model import DTYPES
from stages.engines.engine_state import WeightState
from stages.engines.launch import EngineLaunch
from stages.engines.protocol import EngineInfo, ScoredTokens
from stages.engines.request_checks import check_scoring
from stages.engines.weight_files import validate_weights, weight_files
from stages.errors import EngineError, NumericsError

_BATCH_TOKENS: Final = 16384
"""Padded tokens per forward pass."""


class TransformersRewardEngine:
    """Implements `RewardEngine`."""

    def __init__(self, launch: EngineLaunch, model_dir: Path) -> None:
        """Build the model of a directory; its weights come with `load_weights`.

        Raises:
            EngineError: The directory's model has no linear head with one output.
        """
        torch.set_num_threads(launch.threads)
        self._launch = launch
        self._device = torch.device("cuda" if torch.cuda.is_available() and launch.gpus else "cpu")
        self._architecture = read_architecture(model_dir)
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        with no_init_weights():
            model = AutoModelForSequenceClassification.from_config(config, dtype=DTYPES[launch.dtype])
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Linear) or head.out_features != 1:
            raise EngineError(
                f"{type(model).__name__} of {model_dir} has no linear head `score` with one output (num_labels 1), "
                "which a reward model needs; give a sequence classifier with one label",
                model_dir=str(model_dir),
            )
        self._vocabulary = int(config.get_text_config().vocab_size)
        self._model: Any = model.to(self._device).eval().requires_grad_(requires_grad=False)
        self.weights = WeightState(launch.name)
        """Which weights are held."""

    def info(self) -> EngineInfo:
        """Describe the engine and the weights it holds."""
        return EngineInfo(
            name=self._launch.name,
            version=transformers.__version__,
            dtype=self._launch.dtype,
            device=self._device.type,
            logprob_mode="processed",
            is_batch_invariant=False,
            policy_version=self.weights.policy_version,
            weights_hash=self.weights.weights_hash,
        )

    def close(self) -> None:
        """Free the model; the engine can't be used afterwards."""
        self.weights.give_up("it was closed")
        del self._model

    def load_weights(self, directory: Path, policy_version: int, weights_hash: str) -> None:
        """Replace the weights in place; nothing is touched unless the directory has exactly this model's tensors.

        Raises:
            EngineError: The directory doesn't fit (weights left alone), or reading failed half-way (engine unusable).
        """
        self.weights.require_usable()
        require_same_architecture(directory, self._architecture)
        state = self._model.state_dict()
        validate_weights(directory, {name: tuple(tensor.shape) for name, tensor in state.items()})
        with self.weights.replacing(policy_version, weights_hash), torch.inference_mode():
            for file in weight_files(directory):
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.offset_keys():
                        state[name].copy_(tensors.get_tensor(name))

    def rewards(self, rows: Sequence[ScoredTokens]) -> list[float]:
        """Return the score of each prompt with its completion, [rows].

        Raises:
            NumericsError: A score is no finite number.
        """
        self.weights.require_weights()
        check_scoring(rows, self._launch, self._vocabulary)
        sequences = [[*row.prompt_token_ids, *row.completion_token_ids] for row in rows]
        scores = [math.nan] * len(rows)
        with torch.inference_mode():
            for batch in _batches(sequences):
                found = self._scores([sequences[index] for index in batch])
                for index, score in zip(batch, found, strict=True):
                    scores[index] = score
        bad = [index for index, score in enumerate(scores) if not math.isfinite(score)]
        if bad:
            raise NumericsError(
                f"the reward model's score is not finite for {len(bad)} of {len(rows)} completions, first row "
                f"{bad[0]}; its weights are broken or overflow in this dtype",
                rows=bad[:20],
            )
        return scores

    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        width = max(len(sequence) for sequence in sequences)
        ids = torch.zeros(len(sequences), width, dtype=torch.int64)
        for place, sequence in enumerate(sequences):
            ids[place, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
        hidden = self._model.base_model(input_ids=ids.to(self._device), use_cache=False).last_hidden_state
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=self._device)
        states = hidden[torch.arange(len(sequences), device=self._device), last]
        scores: list[float] = self._model.score(states).squeeze(-1).float().tolist()
        return scores


def _batches(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Rows of like length together, at most `_BATCH_TOKENS` padded tokens a batch (one row is always allowed)."""
    batch: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda row: (-len(sequences[row]), row)):
        # The first row of a batch is its longest.
        if batch and (len(batch) + 1) * len(sequences[batch[0]]) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
