"""Checks of a dataset before anything is trained: lengths, gold answers, size. All faults are reported together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stages.data.dataset import Dataset, SplitDataset
from stages.data.gold_fault import GoldFault
from stages.data.rows import PromptRow
from stages.data.spec import DataSpec
from stages.data.template import EncodedPrompt
from stages.errors import DataError

_SHOWN_EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedDataset:
    """A dataset that can be trained on, and what was left out of it."""

    dataset: SplitDataset
    """What remains."""

    num_dropped_too_long: int
    """Rows left out for their length."""

    num_dropped_unparsable_gold: int
    """Rows left out since no verifier can judge them, or no completion can be right."""


def validate_dataset(
    dataset: SplitDataset,
    spec: DataSpec,
    *,
    encoded: Sequence[EncodedPrompt],
    gold_faults: Sequence[GoldFault],
    max_prompt_tokens: int,
    max_over_length_fraction: float,
    num_prompts: int,
) -> ValidatedDataset:
    """Drop what the spec lets drop, refuse the rest.

    Args:
        dataset: Both parts.
        spec: What to do with rows that don't fit.
        encoded: Prompts of all rows of both parts, in any order.
        gold_faults: Rows that the verifiers can't judge (`VerifierPool.gold_faults`), or on which no completion can be
            right (`stages.rewards.reachable_gold`).
        max_prompt_tokens: Longest prompt, tokens.
        max_over_length_fraction: Largest share of rows that may be dropped for their length.
        num_prompts: Prompts per iteration; the training part must hold as many.

    Raises:
        DataError: Every fault, with counts and the first examples.
    """
    rows = (*dataset.train.rows, *dataset.held_out.rows)
    lengths = {prompt.prompt_id: len(prompt.token_ids) for prompt in encoded}
    too_long = {row.prompt_id for row in rows if lengths[row.prompt_id] > max_prompt_tokens}
    unjudged = {fault.prompt_id: "; ".join(fault.reasons) for fault in gold_faults}
    faults = [
        *_empty_faults(rows, lengths),
        *_unknown_faults(encoded),
        *_length_faults(rows, too_long, lengths, max_prompt_tokens, max_over_length_fraction, spec),
        *_gold_faults(rows, unjudged, spec),
    ]
    left_out = too_long | unjudged.keys()
    train, held_out = (_without(part, left_out) for part in (dataset.train, dataset.held_out))
    if len(train) < num_prompts and not faults:
        faults.append(
            f"{len(train)} rows remain to train on ({len(rows)} read, {len(held_out)} held out, {len(left_out)} left "
            f"out for their length or their gold answer), but an iteration takes {num_prompts} (batch.prompts and "
            "asynchrony.spare_prompts); give more rows or lower batch.prompts"
        )
    if faults:
        raise DataError(f"data.source {spec.source!r} can't be used: {' | '.join(faults)}", num_faults=len(faults))
    return ValidatedDataset(
        dataset=replace(dataset, train=train, held_out=held_out),
        num_dropped_too_long=len(too_long),
        num_dropped_unparsable_gold=len(unjudged.keys() - too_long),
    )


def _empty_faults(rows: Sequence[PromptRow], lengths: Mapping[str, int]) -> list[str]:
    empty = [row.prompt_id for row in rows if lengths[row.prompt_id] == 0]
    if not empty:
        return []
    return [f"{len(empty)} prompts have no token, first: {', '.join(empty[:_SHOWN_EXAMPLES])}; mend them"]


def _unknown_faults(encoded: Sequence[EncodedPrompt]) -> list[str]:
    unreadable = [prompt for prompt in encoded if prompt.num_unknown]
    if not unreadable:
        return []
    shown = ", ".join(f"{prompt.prompt_id} ({prompt.text[:40]!r})" for prompt in unreadable[:_SHOWN_EXAMPLES])
    return [
        f"{len(unreadable)} of {len(encoded)} prompts hold text that the tokenizer doesn't know, first: {shown}; mend "
        "them, or give the model a tokenizer that does (source.alphabet)"
    ]


def _length_faults(
    rows: Sequence[PromptRow],
    too_long: set[str],
    lengths: Mapping[str, int],
    max_prompt_tokens: int,
    max_fraction: float,
    spec: DataSpec,
) -> list[str]:
    fraction = len(too_long) / len(rows)
    if not too_long or (spec.too_long == "drop" and fraction <= max_fraction):
        return []
    shown = [f"{row.prompt_id} ({lengths[row.prompt_id]} tokens)" for row in rows if row.prompt_id in too_long]
    remedy = (
        f"the share {fraction:.3g} is over limits.max_over_length_fraction {max_fraction}"
        if spec.too_long == "drop"
        else "shorten them, raise data.max_prompt_tokens, or set data.too_long to drop"
    )
    return [
        f"{len(too_long)} of {len(rows)} prompts are longer than {max_prompt_tokens} tokens, first: "
        f"{', '.join(shown[:_SHOWN_EXAMPLES])}; {remedy}"
    ]


def _gold_faults(rows: Sequence[PromptRow], unjudged: Mapping[str, str], spec: DataSpec) -> list[str]:
    if not unjudged:
        return []
    shown = "; ".join(f"{prompt_id}: {reason}" for prompt_id, reason in list(unjudged.items())[:_SHOWN_EXAMPLES])
    if len(unjudged) == len(rows):
        return [
            f"the rewards can't judge a single one of {len(rows)} rows, so the reward section doesn't fit the data or "
            f"lengths.response is too small, first: {shown}"
        ]
    if spec.unparsable_gold == "drop":
        return []
    return [
        f"{len(unjudged)} of {len(rows)} gold answers can't be judged or given, first: {shown}; mend them, or set "
        "data.unparsable_gold to drop"
    ]


def _without(part: Dataset, left_out: set[str]) -> Dataset:
    return Dataset(tuple(row for row in part.rows if row.prompt_id not in left_out))
