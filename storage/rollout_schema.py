"""The schema of rollouts and of their column families, version 2: every column with meaning and unit.

One row per completion. Identity is (run, split, iteration, prompt, sample); ``row_id`` is its hash. Neither row id
nor seed depends on placement, shard or attempt. The schema is additive: a newer version may add nullable columns;
a reader fills columns that an older file lacks with null, refuses newer files, and refuses a file that lacks a
required column.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from storage.errors import InvalidInputError
from storage.layout import Split

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 2
"""Version that this code writes, and the newest that it reads."""


class Family(StrEnum):
    """A set of columns that one stage writes, in files of its own, joined by row id."""

    ROLLOUTS = "rollouts"
    """Written by generation and evaluation."""
    REFERENCE = "reference"
    """Log-probs under the reference policy."""
    REWARD = "reward"
    """Outcome of the verifier or reward model."""
    VALUES = "values"
    """The critic's values (PPO)."""
    TRAINING = "training"
    """What training made of the row: advantage, weights, whether and why it was dropped."""


class RewardStatus(StrEnum):
    """How scoring a completion ended; only ``ok`` comes with a value."""

    OK = "ok"
    """Scored; the value may well be 0 for a wrong answer."""
    UNPARSABLE = "unparsable"
    """No answer could be extracted from the completion."""
    TRUNCATED = "truncated"
    """The completion hit its length limit before an answer."""
    TIMED_OUT = "timed_out"
    """The verifier did not finish in time."""
    CRASHED = "crashed"
    """The verifier raised or died."""


class FinishReason(StrEnum):
    """Why sampling of a completion ended."""

    STOP = "stop"
    """An end token or stop sequence was sampled."""
    LENGTH = "length"
    """The token limit was reached."""
    ABORT = "abort"
    """The engine gave up (weights changed, shut down); such a row is not trained on."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a family."""

    name: str
    """Column name."""
    type: str
    """Arrow type: string, int32, int64, float32, float64, bool, timestamp, list<int32>, list<float32>, map<float64>."""
    meaning: str
    """Meaning and unit."""
    is_required: bool = False
    """Whether every row must have a value; required columns must be in every file."""
    values: tuple[str, ...] = ()
    """Allowed values of a text column; empty = any."""
    since: int = 1
    """Schema version that introduced the column."""
    is_provenance: bool = False
    """Whether two attempts at the same inputs may differ in it (times, machine); not part of the content digest."""


_IDENTITY = (
    Column(
        "row_id",
        "string",
        "Hash of (run, split, iteration, prompt_id, sample_index, lineage); joins the families.",
        True,
    ),
    Column("run", "string", "Name of the training run.", True),
    Column("iteration", "int64", "RL iteration; for split eval the policy version that was evaluated.", True),
    Column("split", "string", "Trained on or only measured.", True, tuple(Split)),
    Column("prompt_id", "string", "Data set row as <environment>/<example>, unique over environments.", True),
    Column("prompt_index", "int64", "Position of the prompt in the iteration's batch, from 0.", True),
    Column("sample_index", "int32", "Number of the completion among those of its prompt, from 0.", True),
    Column("group_id", "string", "Hash of (run, split, iteration, prompt_id, lineage): the GRPO prompt group.", True),
)
_SAMPLING = (
    Column("prompt_text", "string", "Prompt as rendered through the chat template, for people to read."),
    Column("completion_text", "string", "Completion decoded from its tokens, for people to read."),
    Column("gold_answer", "string", "Reference answer of the data set row."),
    Column("prompt_token_ids", "list<int32>", "Token ids that the engine was given.", True),
    Column("completion_token_ids", "list<int32>", "Token ids as sampled (never re-tokenised text).", True),
    Column("sampler_logprobs", "list<float32>", "Sampler's log-prob of each completion token, nats.", True),
    Column("finish_reason", "string", "Why sampling ended.", True, tuple(FinishReason)),
    Column("policy_version_first", "int64", "Policy version that sampled the first completion token.", True),
    Column("policy_version_last", "int64", "Policy version that sampled the last completion token.", True),
    Column("token_policy_versions", "list<int32>", "Policy version that sampled each completion token.", since=2),
    Column("weights_hash", "string", "Hash of the last policy's tensors (storage.weights_hash).", True),
    Column("temperature", "float64", "Sampling temperature; 0 is greedy.", True),
    Column("top_p", "float64", "Nucleus probability mass, in (0, 1].", True),
    Column("top_k", "int64", "Number of most likely tokens sampled from; null = all."),
    Column("seed", "int64", "63-bit seed of this sample (sample_seed).", True),
)
_PROVENANCE = (
    Column("engine", "string", "Generation engine, e.g. transformers, vllm.", is_required=True, is_provenance=True),
    Column("engine_version", "string", "Version of the engine's package.", is_required=True, is_provenance=True),
    Column(
        "dtype",
        "string",
        "Number type of the sampler's weights: float32, bfloat16, float16.",
        is_required=True,
        is_provenance=True,
    ),
    Column(
        "logprob_mode",
        "string",
        "What sampler_logprobs are of: processed (temperature, top-p, top-k) or raw.",
        is_required=True,
        is_provenance=True,
    ),
    Column("template_hash", "string", "SHA-256 of the chat template.", is_provenance=True),
    Column("tokenizer_hash", "string", "SHA-256 of the tokenizer files.", is_provenance=True),
    Column("region", "string", "Region of the machine.", is_provenance=True),
    Column("machine", "string", "Machine that sampled.", is_provenance=True),
    Column("gpu_type", "string", "GPU type, or cpu.", is_provenance=True),
    Column("shard", "int32", "Shard that the row was written in.", is_required=True, is_provenance=True),
    Column("started_at", "timestamp", "When sampling of the row began, UTC.", is_provenance=True),
    Column("ended_at", "timestamp", "When sampling of the row ended, UTC.", is_provenance=True),
)
_ROW_ID = (Column("row_id", "string", "Row of the rollouts that this belongs to.", True),)

COLUMNS: dict[Family, tuple[Column, ...]] = {
    Family.ROLLOUTS: _IDENTITY + _SAMPLING + _PROVENANCE,
    Family.REFERENCE: (
        *_ROW_ID,
        Column("reference_logprobs", "list<float32>", "Reference policy's log-prob per completion token, nats.", True),
        Column("reference_weights_hash", "string", "Hash of the reference policy's tensors."),
    ),
    Family.REWARD: (
        *_ROW_ID,
        Column("reward", "float64", "Total reward; null unless reward_status is ok."),
        Column("reward_status", "string", "How scoring ended.", True, tuple(RewardStatus)),
        Column("reward_parts", "map<float64>", "Reward by part before weighting, e.g. answer, format."),
        Column("verifier", "string", "Verifier or reward model, with version.", True),
        Column("parsed_answer", "string", "Answer that the verifier extracted."),
        Column("reward_error", "string", "What went wrong, for statuses timed_out and crashed.", is_provenance=True),
        Column("reward_s", "float64", "Time that scoring took, seconds.", is_provenance=True),
    ),
    Family.VALUES: (
        *_ROW_ID,
        Column("values", "list<float32>", "Critic's value per completion token, in units of reward.", True),
        Column("critic_version", "int64", "Version of the critic."),
    ),
    Family.TRAINING: (
        *_ROW_ID,
        Column("advantage", "float64", "Advantage of the row (GRPO), or mean over its tokens (PPO); null if dropped."),
        Column("is_dropped", "bool", "Whether training left the row out.", True),
        Column("dropped_reason", "string", "Why it was left out, e.g. stale, zero_variance, no_reward."),
        Column("staleness", "int64", "Trained policy version minus policy_version_first, at consumption."),
        Column("importance_weight_mean", "float64", "Mean over tokens of exp(trainer - sampler log-prob)."),
        Column("importance_weight_max", "float64", "Maximum over tokens of exp(trainer - sampler log-prob)."),
        Column("num_truncated_weights", "int32", "Tokens whose importance weight was truncated."),
        Column(
            "trainer_logprob_mean", "float64", "Mean over tokens of the trainer's log-prob before the update, nats."
        ),
        Column("trainer_logprob_min", "float64", "Minimum over tokens of the trainer's log-prob, nats."),
        Column("logprob_gap_max", "float64", "Maximum over tokens of |trainer - sampler log-prob|, nats."),
        Column("trained_policy_version", "int64", "Policy version that the update started from."),
    ),
}
"""Every column of every family."""


def arrow_schema(family: Family | str = Family.ROLLOUTS) -> pa.Schema:
    """Return the Arrow schema of a family, with meanings as field metadata and the version as schema metadata."""
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float32": pa.float32(),
        "float64": pa.float64(),
        "bool": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "list<int32>": pa.list_(pa.int32()),
        "list<float32>": pa.list_(pa.float32()),
        "map<float64>": pa.map_(pa.string(), pa.float64()),
    }
    name = Family(family)
    fields = [
        pa.field(column.name, types[column.type], nullable=not column.is_required, metadata={"meaning": column.meaning})
        for column in COLUMNS[name]
    ]
    return pa.schema(fields, metadata={"motley.schema": f"{name.value}/{SCHEMA_VERSION}"})


def prompt_id(environment: str, example: str | int) -> str:
    """Return the identity of a data set row: the same example id in two environments is two prompts.

    Args:
        environment: Data set or environment name; any text without ``/``.
        example: Row id inside it.

    Raises:
        InvalidInputError: The environment is empty or holds ``/`` (two pairs could then give one id).
    """
    if not environment or "/" in environment:
        message = f"environment {environment!r} cannot be part of a prompt id: it must be text without '/'"
        raise InvalidInputError(message)
    return f"{environment}/{example}"


class RowIdentity:
    """Row and group ids of one iteration's completions; quick when asked for many."""

    def __init__(self, run: str, iteration: int, split: Split, lineage: int = 0) -> None:
        """Prepare for the completions of one iteration.

        Args:
            run: Run name.
            iteration: RL iteration (split eval: policy version evaluated), >= 0.
            split: Train or eval.
            lineage: How often the iteration was set aside by a rewind.
        """
        self._lineage = _prefixed(*_lineage(lineage))
        fixed = (run, split.value, str(iteration))
        self._row = hashlib.sha256(_prefixed("row", *fixed))
        self._group = hashlib.sha256(_prefixed("group", *fixed))
        self._rows: dict[str, hashlib._Hash] = {}
        self._groups: dict[str, str] = {}
        self._samples: dict[int, bytes] = {}

    def row_id(self, prompt: str, sample: int) -> str:
        """Return the identity of a completion; see :func:`row_id`."""
        started = self._rows.get(prompt)
        if started is None:
            started = self._row.copy()
            started.update(_prefixed(prompt))
            self._rows[prompt] = started
        suffix = self._samples.get(sample)
        if suffix is None:
            suffix = self._samples[sample] = _prefixed(str(sample)) + self._lineage
        digest = started.copy()
        digest.update(suffix)
        return digest.hexdigest()[:32]

    def group_id(self, prompt: str) -> str:
        """Return the identity of a prompt group; see :func:`group_id`."""
        found = self._groups.get(prompt)
        if found is None:
            digest = self._group.copy()
            digest.update(_prefixed(prompt) + self._lineage)
            found = self._groups[prompt] = digest.hexdigest()[:32]
        return found


def row_id(
    run: str, iteration: int, prompt: str, sample: int, split: Split | str = Split.TRAIN, lineage: int = 0
) -> str:
    """Return the identity of a completion: 32 hex digits, the same on every placement, shard and attempt.

    Args:
        run: Run name.
        iteration: RL iteration (split eval: policy version evaluated), >= 0.
        prompt: Prompt id from :func:`prompt_id`.
        sample: Number among the prompt's completions, >= 0.
        split: Train or eval.
        lineage: How often the iteration was set aside by a rewind, so that rows made anew are never taken for those
            made before.
    """
    return RowIdentity(run, iteration, Split(split), lineage).row_id(prompt, sample)


def group_id(run: str, iteration: int, prompt: str, split: Split | str = Split.TRAIN, lineage: int = 0) -> str:
    """Return the identity of a prompt group (all completions of one prompt in one iteration): 32 hex digits."""
    return RowIdentity(run, iteration, Split(split), lineage).group_id(prompt)


def sample_seed(
    run_seed: int, iteration: int, prompt: str, sample: int, split: Split | str = Split.TRAIN, lineage: int = 0
) -> int:
    """Return the sampler's seed of a completion, in [0, 2**63).

    It depends on identity only: not on placement, shard, attempt or batch. The run enters through its seed and not
    through its name, so two runs of one spec and seed sample the same tokens.

    Args:
        run_seed: The run's sampling seed.
        iteration: RL iteration.
        prompt: Prompt id.
        sample: Number among the prompt's completions.
        split: Train or eval.
        lineage: How often the iteration was set aside by a rewind: what is made anew is sampled anew.
    """
    parts = ("seed", str(run_seed), Split(split).value, str(iteration), prompt, str(sample))
    raw = _digest(*parts, *_lineage(lineage))
    return int.from_bytes(raw[:8], "big") >> 1


def _lineage(lineage: int) -> tuple[str, ...]:
    """Return what a lineage adds to an identity: nothing for the first one."""
    return (f"lineage-{lineage}",) if lineage else ()


def _digest(*parts: str) -> bytes:
    return hashlib.sha256(_prefixed(*parts)).digest()


def _prefixed(*parts: str) -> bytes:
    """Return length-prefixed parts, so no two different tuples share their bytes."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in encoded)
