"""Generation and scoring with Hugging Face models in plain torch, on any device; the default engine.

Sampled tokens depend on the row alone (see `stages.engines.tiles` for how), log-probs are those of the distribution
that was sampled from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

from stages.engines.adapter_files import validate_adapter
from stages.engines.architecture import read_architecture, require_same_architecture, unfit_directory
from stages.engines.causal_model import CausalModel, PaddedTokens
from stages.engines.engine_state import WeightState
from stages.engines.generation_wave import GenerationWave, known_tokens
from stages.engines.launch import EngineLaunch
from stages.engines.lora import add_adapter, base_state, read_adapter_into, switch_adapter_off
from stages.engines.protocol import AdapterBase, Completion, EngineInfo, GenerationRequest, ScoredTokens
from stages.engines.request_checks import check_generation, check_scoring
from stages.engines.sampling import normalise
from stages.engines.tiles import TileShape, blocks, grouped, padded_length
from stages.engines.weight_files import read_shapes, validate_weights, weight_files
from stages.errors import EngineError


class TransformersEngine:
    """Samples and scores with a causal language model of transformers.

    Options: `tile_rows`, rows of a decoding tile (default from the model's size). It changes speed and rounding; runs
    are comparable token by token only with the same value.
    """

    def __init__(self, launch: EngineLaunch, model_dir: Path) -> None:
        torch.set_num_threads(launch.threads)
        self._launch = launch
        self._device = "cuda" if torch.cuda.is_available() and launch.gpus else "cpu"
        self._architecture = read_architecture(model_dir)
        self._model = CausalModel(model_dir, launch.dtype, self._device)
        if launch.lora is not None:
            add_adapter(self._model.module, launch.lora)
            self._model.module.requires_grad_(requires_grad=False)
        self._base_hash: str | None = None
        self._tile = self._choose_tile()
        self._require_room(model_dir)
        self.weights = WeightState(launch.name)
        """Which weights are held."""
        self.is_interrupted: Callable[[], bool] = lambda: False
        """Says whether sampling must make room for new weights; set by the process around the engine."""

    def info(self) -> EngineInfo:
        """Describe the engine and the weights it holds."""
        return EngineInfo(
            name=self._launch.name,
            version=transformers.__version__,
            dtype=self._launch.dtype,
            device=self._device,
            logprob_mode="processed",
            # Shown bit by bit on CPU only: other devices' matrix products may treat rows of a tile differently.
            is_batch_invariant=self._device == "cpu" and self._launch.dtype == "fp32",
            policy_version=self.weights.policy_version,
            weights_hash=self.weights.weights_hash,
        )

    def close(self) -> None:
        """Free the model; the engine can't be used afterwards."""
        self.weights.give_up("it was closed")
        del self._model

    def load_weights(
        self, directory: Path, policy_version: int, weights_hash: str, base: AdapterBase | None = None
    ) -> None:
        """Replace the weights in place; nothing is touched unless directory and base have exactly this model's tensors.

        Of an adapter, the base is read only where the engine holds another one.

        Raises:
            EngineError: A directory doesn't fit (weights left alone), or reading failed half-way (engine unusable).
        """
        self.weights.require_usable()
        model = self._model.module
        if base is not None:
            if self._launch.lora is None:
                raise unfit_directory(directory, "it holds an adapter, but this engine was started for whole weights")
            validate_adapter(directory, self._launch.lora, _shapes(base_state(model)))
        whole = AdapterBase(directory=directory, weights_hash=weights_hash) if base is None else base
        is_held = base is not None and self._base_hash == base.weights_hash
        if not is_held:
            self._validate_whole(whole.directory)
        with self.weights.replacing(policy_version, weights_hash), torch.inference_mode():
            if not is_held:
                self._base_hash = None
                self._read_whole(whole.directory)
                self._base_hash = whole.weights_hash
            if base is not None:
                read_adapter_into(model, directory)
            elif self._launch.lora is not None:
                switch_adapter_off(model)

    def _validate_whole(self, directory: Path) -> None:
        require_same_architecture(directory, self._architecture)
        state = base_state(self._model.module)
        tied = self._tied_names(state)
        validate_weights(directory, _shapes(state), optional=tied)
        self._require_equal_twins(directory, tied)

    def _read_whole(self, directory: Path) -> None:
        state = base_state(self._model.module)
        for file in weight_files(directory):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.offset_keys():
                    state[name].copy_(tensors.get_tensor(name))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample one completion per request, in the order of the requests."""
        self.weights.require_weights()
        check_generation(requests, self._launch, self._model.vocabulary)
        with torch.inference_mode():
            return self._generate(requests)

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        weights = self.weights.held()
        completions: dict[int, Completion] = {}
        lengths = [padded_length(len(known_tokens(request))) for request in requests]
        for length, members in grouped(lengths).items():
            for block in blocks(members, self._launch.max_num_seqs):
                if self.is_interrupted():
                    completions.update((index, _not_begun(weights)) for index in block)
                    continue
                part = [requests[index] for index in block]
                wave = GenerationWave(
                    self._model, self._tile, part, length, self._launch.max_completion_tokens, weights
                )
                completions.update(zip(block, wave.run(self.is_interrupted), strict=True))
        return [completions[index] for index in range(len(requests))]

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Return the log-prob of each completion token at the row's temperature. [rows][completion tokens]."""
        self.weights.require_weights()
        check_scoring(rows, self._launch, self._model.vocabulary)
        with torch.inference_mode():
            return self._score(rows)

    def _score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        scores: dict[int, list[float]] = {}
        shapes = [
            (
                padded_length(len(row.prompt_token_ids) + len(row.completion_token_ids)),
                padded_length(len(row.completion_token_ids)),
            )
            for row in rows
        ]
        for (length, scored), members in grouped(shapes).items():
            num_rows = self._tile.scoring_rows(length, scored + 1)
            for block in blocks(members, num_rows):
                part = [rows[index] for index in block]
                scores.update(zip(block, self._score_tile(part, num_rows, length, scored), strict=True))
        return [scores[index] for index in range(len(rows))]

    def _score_tile(self, rows: Sequence[ScoredTokens], num_rows: int, length: int, scored: int) -> list[list[float]]:
        if scored == 0:
            return [[] for _ in rows]
        ids = [[*row.prompt_token_ids, *row.completion_token_ids] for row in rows]
        tokens = PaddedTokens(ids, num_rows, length)
        keep = min(scored + 1, length)
        logits = self._model.score(tokens, keep)[: len(rows), :-1].double()
        temperature = torch.tensor([row.temperature for row in rows], dtype=torch.float64, device=logits.device)
        targets = tokens.ids[: len(rows), length - keep + 1 :].to(logits.device)
        logprobs = normalise(logits / temperature.view(-1, 1, 1)).gather(-1, targets.unsqueeze(-1)).squeeze(-1).tolist()
        return [line[len(line) - len(row.completion_token_ids) :] for line, row in zip(logprobs, rows, strict=True)]

    def _choose_tile(self) -> TileShape:
        tile = TileShape.for_model(self._model.config.hidden_size, self._model.vocabulary, self._device)
        unknown = sorted(set(self._launch.options) - {"tile_rows"})
        rows = self._launch.options.get("tile_rows", tile.decode_rows)
        if unknown or not isinstance(rows, int) or rows < 1:
            raise EngineError(
                f"engine options {dict(self._launch.options)}: the transformers engine knows only `tile_rows`, a whole "
                "number of at least 1",
                options=dict(self._launch.options),
            )
        return TileShape(rows, tile.prefill_tokens, tile.vocabulary)

    def _require_room(self, model_dir: Path) -> None:
        wanted = self._launch.max_prompt_tokens + self._launch.max_completion_tokens
        limit = getattr(self._model.config, "max_position_embeddings", wanted)
        if wanted > limit:
            raise EngineError(
                f"{model_dir}: prompt and completion may have {wanted} tokens together, the model has "
                f"{limit} positions; shorten lengths.prompt or lengths.response",
                wanted=wanted,
                limit=limit,
            )

    def _tied_names(self, state: dict[str, torch.Tensor]) -> dict[str, str]:
        """Return the tensors that are another one by a second name (target to source)."""
        pairs: dict[str, str] = getattr(self._model.module, "all_tied_weights_keys", None) or {}
        return {
            target: source
            for target, source in pairs.items()
            if target in state and source in state and state[target].data_ptr() == state[source].data_ptr()
        }

    def _require_equal_twins(self, directory: Path, tied: dict[str, str]) -> None:
        """Refuse a directory in which a tied tensor stands twice with different values."""
        found = read_shapes(directory)
        for target, source in tied.items():
            if target in found and source in found and not _are_equal(directory, target, source):
                raise EngineError(
                    f"{directory} can't be loaded: {target} and {source} differ, but this model ties them. The engine "
                    "was left as it was; set tie_word_embeddings to false in the job's model",
                    directory=str(directory),
                )


def _not_begun(weights: tuple[int, str]) -> Completion:
    version, digest = weights
    return Completion(
        token_ids=(), logprobs=(), finish_reason="interrupted", policy_version=version, weights_hash=digest
    )


def _shapes(state: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _are_equal(directory: Path, first: str, second: str) -> bool:
    tensors: list[torch.Tensor] = []
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as content:
            tensors.extend(content.get_tensor(name) for name in (first, second) if name in content.offset_keys())
    return bool(torch.equal(*tensors))
