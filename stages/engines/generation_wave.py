"""A wave: rows of one padded prompt length that are decoded in lock-step, in tiles of constant shape.

Equal prompts are prefilled once. Finished rows leave as soon as the live ones fit into fewer tiles; since tiles keep
their shape, that changes no live row's numbers. Every decode step is a point at which the wave can be interrupted; a
continued request brings the tokens that it has, and gets the same draws from there on.

Legend of shapes: R rows of the wave (a multiple of the tile), U distinct prompts, V vocabulary, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stages.engines.causal_model import CausalModel, PaddedTokens, TileCache, additive_mask
from stages.engines.protocol import Completion, FinishReason, GenerationRequest
from stages.engines.sampling import SamplingRows, processed_logprobs, sample_tokens, uniforms
from stages.engines.tiles import TileShape, blocks

_DUMMY = -1


class GenerationWave:
    """Decodes requests whose prompts are padded to the same length."""

    def __init__(
        self,
        model: CausalModel,
        tile: TileShape,
        requests: Sequence[GenerationRequest],
        length: int,
        max_tokens: int,
        weights: tuple[int, str],
    ) -> None:
        """Keep what is to be decoded.

        Args:
            model: The model.
            tile: Shapes of its calls.
            requests: Requests whose known tokens are padded to the same length.
            length: That length, tokens.
            max_tokens: Longest completion that any request may ask for.
            weights: Version and hash of the model's weights.
        """
        self._weights = weights
        self._model = model
        self._rows = tile.decode_rows
        self._tile = tile
        self._requests = requests
        self._length = length
        self._capacity = length + max_tokens
        num = len(requests)
        self._limits = torch.tensor([request.max_tokens - len(request.sampled_token_ids) for request in requests])
        longest = int(self._limits.max())
        self._draws = _draws(requests, longest)
        self._settings = _settings_of(requests)
        self._stops = _stop_table(requests)
        self._known = [known_tokens(request) for request in requests]
        self._prompt_lengths = torch.tensor([len(tokens) for tokens in self._known])
        self._tokens = torch.zeros(num, longest, dtype=torch.int64)
        self._logprobs = torch.zeros(num, longest, dtype=torch.float64)
        self._counts = torch.zeros(num, dtype=torch.int64)
        self._is_stopped = torch.zeros(num, dtype=torch.bool)

    def run(self, is_interrupted: Callable[[], bool]) -> list[Completion]:
        """Decode until every row is finished, or an interruption; return completions in the order of the requests."""
        live = self._fill_up(torch.arange(len(self._requests)))
        logits = self._prefill(live)
        step = 0
        while True:
            sampled = [
                self._sample(part, block, step) for part, block in zip(live.split(self._rows), logits, strict=True)
            ]
            keep = self._unfinished(live)
            if not keep.numel() or is_interrupted():
                break
            tokens = torch.cat(sampled)
            if self._needed_rows(keep.numel()) < live.numel():
                order = self._fill_up(keep, filler=0)
                tokens = tokens[order]
                members = live[order]
                members[keep.numel() :] = _DUMMY
                self._reorder(order)
                live = members
            logits = self._decode(live, tokens, step)
            step += 1
        return self._completions()

    def _needed_rows(self, num: int) -> int:
        return -(-num // self._rows) * self._rows

    def _fill_up(self, rows: Tensor, filler: int = _DUMMY) -> Tensor:
        """Append fillers until there are only whole tiles."""
        missing = self._needed_rows(rows.numel()) - rows.numel()
        return torch.cat([rows, torch.full((missing,), filler, dtype=torch.int64)])

    def _prefill(self, live: Tensor) -> list[Tensor]:
        """Run each distinct prompt once and hand its cache and logits to its rows; return logits per tile."""
        prompts: dict[tuple[int, ...], int] = {}
        owner = [prompts.setdefault(tokens, len(prompts)) for tokens in self._known]
        rows = self._tile.prefill_rows(self._length)
        distinct = list(prompts)
        logits: list[Tensor] = []
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        for block in blocks(range(len(distinct)), rows):
            tokens = PaddedTokens([distinct[index] for index in block], rows, self._length)
            tile_logits, cache = self._model.prefill(tokens)
            logits.append(tile_logits[: len(block)])
            keys.append([layer[: len(block)] for layer in cache.keys])
            values.append([layer[: len(block)] for layer in cache.values])
        source = torch.tensor([owner[row] if row >= 0 else 0 for row in live.tolist()], device=self._model.device)
        self._keys = [self._spread(layers, source) for layers in zip(*keys, strict=True)]
        self._values = [self._spread(layers, source) for layers in zip(*values, strict=True)]
        self._set_padding(live)
        all_logits = torch.cat(logits)
        return [all_logits[part] for part in source.split(self._rows)]

    def _spread(self, tiles: Sequence[Tensor], source: Tensor) -> Tensor:
        """Copy the prompts' keys or values [U, G, L, D] to the rows, with room for the completion."""
        prompts = torch.cat(list(tiles))
        _, heads, length, width = prompts.shape
        storage = prompts.new_empty(source.numel(), heads, self._capacity, width)
        storage[:, :, :length] = prompts[source]
        return storage

    def _set_padding(self, live: Tensor) -> None:
        lengths = torch.where(live >= 0, self._prompt_lengths[live], 1)
        self._start_positions = lengths.to(self._model.device)
        is_seen = torch.arange(self._capacity) >= (self._length - lengths).unsqueeze(-1)
        self._mask = additive_mask(is_seen, self._model.dtype).view(live.numel(), 1, 1, -1).to(self._model.device)

    def _reorder(self, order: Tensor) -> None:
        order = order.to(self._model.device)
        for layer in range(len(self._keys)):
            self._keys[layer] = self._keys[layer][order]
            self._values[layer] = self._values[layer][order]
        self._mask = self._mask[order]
        self._start_positions = self._start_positions[order]

    def _decode(self, live: Tensor, tokens: Tensor, step: int) -> list[Tensor]:
        """Run the tokens of all tiles; return logits per tile."""
        position = self._length + step
        ids = tokens.unsqueeze(-1).to(self._model.device)
        logits: list[Tensor] = []
        for start in range(0, live.numel(), self._rows):
            part = slice(start, start + self._rows)
            cache = TileCache([k[part] for k in self._keys], [v[part] for v in self._values], position)
            positions = (self._start_positions[part] + step).unsqueeze(-1)
            mask = self._mask[part, :, :, : position + 1]
            logits.append(self._model.decode(ids[part], positions, mask, cache))
        return logits

    def _sample(self, members: Tensor, logits: Tensor, step: int) -> Tensor:
        """Sample a tile's next tokens and note those of unfinished rows; return token ids, 0 for all others. [B]."""
        result = torch.zeros(members.numel(), dtype=torch.int64)
        positions = (members >= 0).nonzero().squeeze(-1)
        positions = positions[~self._is_finished(members[positions])]
        if not positions.numel():
            return result
        rows = members[positions]
        settings = self._settings.select(rows)
        logprobs = processed_logprobs(logits[positions.to(logits.device)].cpu(), settings)
        chosen = sample_tokens(logprobs, settings, self._draws[rows, step])
        self._tokens[rows, step] = chosen
        self._logprobs[rows, step] = logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        self._counts[rows] = step + 1
        self._is_stopped[rows] = (chosen.unsqueeze(-1) == self._stops[rows]).any(dim=-1)
        result[positions] = chosen
        return result

    def _is_finished(self, rows: Tensor) -> Tensor:
        return self._is_stopped[rows] | (self._counts[rows] >= self._limits[rows])

    def _unfinished(self, live: Tensor) -> Tensor:
        """Return the places in `live` whose rows go on."""
        return ((live >= 0) & ~self._is_finished(live)).nonzero().squeeze(-1)

    def _completions(self) -> list[Completion]:
        tokens, logprobs = self._tokens.tolist(), self._logprobs.tolist()
        version, digest = self._weights
        return [
            Completion(
                token_ids=tokens[row][:count],
                logprobs=logprobs[row][:count],
                finish_reason=self._finish_reason(row),
                policy_version=version,
                weights_hash=digest,
            )
            for row, count in enumerate(self._counts.tolist())
        ]

    def _finish_reason(self, row: int) -> FinishReason:
        if self._is_stopped[row]:
            return "stop"
        return "length" if self._counts[row] >= self._limits[row] else "interrupted"


def known_tokens(request: GenerationRequest) -> tuple[int, ...]:
    """Return the tokens behind which a request's sampling goes on: the prompt and what was sampled before."""
    return (*request.prompt_token_ids, *request.sampled_token_ids)


def _draws(requests: Sequence[GenerationRequest], longest: int) -> Tensor:
    """Return each row's uniforms from its first open position on, filled up with 0 behind its limit. [R, longest]."""
    draws = torch.zeros(len(requests), longest, dtype=torch.float64)
    starts = [len(request.sampled_token_ids) for request in requests]
    series = torch.from_numpy(uniforms([request.seed for request in requests], longest + max(starts)))
    for row, start in enumerate(starts):
        draws[row] = series[row, start : start + longest]
    return draws


def _settings_of(requests: Sequence[GenerationRequest]) -> SamplingRows:
    return SamplingRows(
        temperature=torch.tensor([request.temperature for request in requests], dtype=torch.float64),
        top_k=torch.tensor([request.top_k for request in requests], dtype=torch.int64),
        top_p=torch.tensor([request.top_p for request in requests], dtype=torch.float64),
    )


def _stop_table(requests: Sequence[GenerationRequest]) -> Tensor:
    """Return each row's stop ids, filled up with -1. [R, most stop ids]."""
    width = max(1, max(len(request.stop_token_ids) for request in requests))
    table = np.full((len(requests), width), -1, dtype=np.int64)
    for row, request in enumerate(requests):
        table[row, : len(request.stop_token_ids)] = request.stop_token_ids
    return torch.from_numpy(table)
