"""The canary: fixed rows whose log-probs the trainer stores with a policy version, and every engine must reproduce.

Hashes show that files arrived; only log-probs show that an engine computes with them (a reload may leave a packed copy
of a tied head stale, without an error). Needs no torch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from stages.engines.protocol import ScoredTokens
from stages.errors import ContractError, WeightMismatchError
from stages.rl.logprob_gap import LogprobGap, measure_logprob_gap

NUM_ROWS: Final = 4
"""Canary rows."""
COMPLETION_TOKENS: Final = 32
"""Tokens scored per row, at most."""
SAME_ENGINE_GAP: Final = 1e-6
"""Training engines on one machine come back with the same numbers bit for bit; anything more is another state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRecord:
    """Rows and the trainer's log-probs of them, as stored with a policy version."""

    rows: Sequence[ScoredTokens]
    """What is scored."""
    trainer_logprobs: Sequence[Sequence[float]]
    """Log-probs under the published weights, [rows][completion tokens]."""

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object."""
        rows = [
            {
                "prompt_token_ids": list(row.prompt_token_ids),
                "completion_token_ids": list(row.completion_token_ids),
                "temperature": row.temperature,
            }
            for row in self.rows
        ]
        return {"rows": rows, "trainer_logprobs": [list(values) for values in self.trainer_logprobs]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The record that `to_json` described.

        Raises:
            ContractError: The document is not one.
        """
        try:
            rows = [
                ScoredTokens(
                    prompt_token_ids=[int(token) for token in row["prompt_token_ids"]],
                    completion_token_ids=[int(token) for token in row["completion_token_ids"]],
                    temperature=float(row["temperature"]),
                )
                for row in document["rows"]
            ]
            logprobs = [[float(value) for value in values] for values in document["trainer_logprobs"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ContractError(f"the canary of a policy version can't be read: {error!r}") from error
        _check_lengths(rows, logprobs, "the stored canary")
        return cls(rows=rows, trainer_logprobs=logprobs)


def canary_rows(
    prompts: Sequence[Sequence[int]], *, vocab_size: int, max_completion_tokens: int, seed: int = 0
) -> list[ScoredTokens]:
    """Fixed rows: real prompts, continued by random token ids, which reach all corners of the vocabulary.

    Args:
        prompts: Encoded prompts of the run; the first `NUM_ROWS` are used, again and again if there are fewer.
        vocab_size: Token ids are drawn below it.
        max_completion_tokens: Longest completion that the engines take.
        seed: Same seed, same rows.
    """
    if not prompts:
        raise ContractError("the canary needs at least one prompt")
    # Seeded by a string, the standard generator gives the same numbers on every platform and version.
    generator = random.Random(f"canary {seed} {vocab_size}")
    length = min(COMPLETION_TOKENS, max_completion_tokens)
    return [
        ScoredTokens(
            prompt_token_ids=list(prompts[place % len(prompts)]),
            completion_token_ids=[generator.randrange(vocab_size) for _ in range(length)],
        )
        for place in range(NUM_ROWS)
    ]


def measure_canary(record: CanaryRecord, engine_logprobs: Sequence[Sequence[float]]) -> LogprobGap:
    """Gap between an engine's scores and the stored ones, nats.

    Raises:
        ContractError: The scores don't belong to the rows.
    """
    _check_lengths(record.rows, engine_logprobs, "the engine's answer to the canary")
    theirs, ours = _flat(engine_logprobs), _flat(record.trainer_logprobs)
    return measure_logprob_gap(theirs, ours, np.ones(ours.shape, dtype=np.bool_))


def check_canary(
    record: CanaryRecord,
    engine_logprobs: Sequence[Sequence[float]],
    *,
    max_gap: float,
    engine: str,
    numbers: str = "log-probs",
    unit: str = "nats",
) -> LogprobGap:
    """Prove that an engine computes with the weights that the trainer published.

    Args:
        record: Stored with the policy version.
        engine_logprobs: The engine's scores of `record.rows`.
        max_gap: Largest allowed mean absolute gap over the tokens, nats.
        engine: Name of the engine, for the message.
        numbers: What was compared, for the message: log-probs, or a critic's values.
        unit: Unit of the numbers, for the message.

    Returns:
        The gap found.

    Raises:
        WeightMismatchError: The gap is over the limit or not a number.
        ContractError: The scores don't belong to the rows.
    """
    gap = measure_canary(record, engine_logprobs)
    if gap.num_tokens == 0 or not gap.mean_abs <= max_gap:
        raise WeightMismatchError(
            f"{engine} does not compute with the weights that the trainer published: on {gap.num_tokens} canary tokens "
            f"its {numbers} differ by {gap.mean_abs:.4g} {unit} in the mean (largest {gap.max_abs:.4g}), allowed "
            f"{max_gap:.4g}; the engine must be started anew. If it stays, the engines differ in dtype or model code",
            engine=engine,
            mean_abs=gap.mean_abs,
            max_abs=gap.max_abs,
            num_tokens=gap.num_tokens,
            limit=max_gap,
        )
    return gap


def _flat(values: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    return np.array([value for row in values for value in row], dtype=np.float64)


def _check_lengths(rows: Sequence[ScoredTokens], logprobs: Sequence[Sequence[float]], what: str) -> None:
    wanted = [len(row.completion_token_ids) for row in rows]
    found = [len(values) for values in logprobs]
    if wanted != found:
        raise ContractError(f"{what} has log-probs for {found} tokens by row, the rows have {wanted}")
