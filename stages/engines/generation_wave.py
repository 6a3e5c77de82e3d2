"""A wave: rows of one padded prompt length that are decoded in lock-step, in tiles of constant shape.

Equal prompts are prefilled once. Finished rows leave as soon as the live ones fit into fewer tiles; since tiles keep
their shape, that changes no live row's numbers.

Legend of shapes: R rows of the wave (a multiple of the tile), U distinct prompts, V vocabulary, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stages.engines.causal_model import CausalModel, PaddedTokens, TileCache, additive_mask
from stages.engines.protocol import Completion, GenerationRequest
from stages.engines.sampling import SamplingRows, processed_logprobs, sample_tokens, uniforms
from stages.engines.tiles import TileShape, blocks

_DUMMY = -1


class GenerationWave:
    """Decodes requests whose prompts are padded to the same length."""

    def __init__(
        self, model: CausalModel, tile: TileShape, requests: Sequence[GenerationRequest], length: int, max_tokens: int
    ) -> None:
        self._model = model
        self._rows = tile.decode_rows
        self._tile = tile
        self._requests = requests
        self._length = length
        self._capacity = length + max_tokens
        num = len(requests)
        longest = max(request.max_tokens for request in requests)
        self._draws = torch.from_numpy(uniforms([request.seed for request in requests], longest))
        self._settings = _settings_of(requests)
        self._limits = torch.tensor([request.max_tokens for request in requests])
        self._stops = _stop_table(requests)
        self._prompt_lengths = torch.tensor([len(request.prompt_token_ids) for request in requests])
        self._tokens = torch.zeros(num, longest, dtype=torch.int64)
        self._logprobs = torch.zeros(num, longest, dtype=torch.float64)
        self._counts = torch.zeros(num, dtype=torch.int64)
        self._is_stopped = torch.zeros(num, dtype=torch.bool)

    def run(self) -> list[Completion]:
        """Decode until every row is finished; return completions in the order of the requests."""
        live = self._fill_up(torch.arange(len(self._requests)))
        logits = self._prefill(live)
        step = 0
        while True:
            sampled = [
                self._sample(part, block, step) for part, block in zip(live.split(self._rows), logits, strict=True)
            ]
            keep = self._unfinished(live)
            if not keep.numel():
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
        owner = [prompts.setdefault(tuple(request.prompt_token_ids), len(prompts)) for request in self._requests]
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
        counts, stopped = self._counts.tolist(), self._is_stopped.tolist()
        return [
            Completion(
                token_ids=tokens[row][: counts[row]],
                logprobs=logprobs[row][: counts[row]],
                finish_reason="stop" if stopped[row] else "length",
            )
            for row in range(len(self._requests))
        ]


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
