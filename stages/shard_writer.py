"""One rollout shard: its requests, its fingerprint, and the rows that are committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from stages.context import StageContext
from stages.dynamic_sampling import SampledGroup
from stages.engines.protocol import EngineInfo, GenerationRequest
from stages.partial_rollouts import Sampled
from stages.prompts import EncodedRow, Prompts
from stages.sharding import ShardRange
from storage.documents import fingerprint
from storage.errors import ObjectMissingError
from storage.layout import Split
from storage.manifest import Manifest
from storage.policies import read_head, resolve_policy
from storage.rollout_schema import sample_seed
from storage.rollouts import find_shard, write_rollouts
from storage.superseded import lineage_of_iteration, lineage_of_version

_NUMBER_TYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """What is to be sampled."""

    split: Split
    """Train or eval."""
    number: int
    """Iteration; for split eval the policy version that is evaluated."""
    prompts: Sequence[EncodedRow]
    """Prompts of the batch, in order."""
    samples_per_prompt: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    oldest_version: int
    """Least policy version that may sample."""
    newest_version: int
    """Greatest policy version that may sample."""
    further: Sequence[EncodedRow] = ()
    """Prompts that may take the place of groups without signal, dealt to the shards in turn; see
    `stages.dynamic_sampling`."""
    max_rounds: int = 0
    """Rounds of such replacements, at most."""

    @property
    def is_pinned(self) -> bool:
        """Whether exactly one policy version may sample."""
        return self.oldest_version == self.newest_version


class ShardWriter:
    """Turns completions into committed shards."""

    def __init__(self, context: StageContext, batch: RolloutBatch, prompts: Prompts, num_shards: int) -> None:
        self.context, self.batch, self.prompts, self.num_shards = context, batch, prompts, num_shards
        head = read_head(context.home, context.run.name)
        is_eval = batch.split is Split.EVAL
        self.lineage = (lineage_of_version if is_eval else lineage_of_iteration)(head, batch.number)

    def fingerprint(self, shard: ShardRange, weights_hashes: Mapping[str, str]) -> str:
        """SHA-256 of what decides the tokens of a shard, apart from the moments at which new weights came.

        Args:
            shard: The shard.
            weights_hashes: Hashes of the weights that sampled it, by policy version.
        """
        batch = self.batch
        made_anew = [f"lineage-{self.lineage}"] if self.lineage else []
        return fingerprint(
            "rollouts", self.context.run.name, self.context.job.fingerprint, self.context.run.seed, batch.split.value,
            batch.number, [prompt.row.prompt_id for prompt in self.prompts_of(shard)], batch.samples_per_prompt,
            batch.temperature, batch.top_p, batch.top_k, self.context.job.planner.lengths.response,
            self.prompts.tokenizer_hash, self.prompts.template_hash, dict(weights_hashes), *self._refill_inputs(shard),
            *made_anew,
        )  # fmt: skip

    def _refill_inputs(self, shard: ShardRange) -> list[object]:
        """Return what decides which further groups a shard has; nothing without dynamic sampling."""
        if not self.batch.max_rounds:
            return []
        rewards = self.context.job.rewards.model_dump(mode="json", exclude={"num_verifier_processes"})
        further = [prompt.row.prompt_id for _, prompt in self.further_of(shard)]
        return [self.batch.max_rounds, further, rewards]

    def further_of(self, shard: ShardRange) -> list[tuple[int, EncodedRow]]:
        """Further prompts of a shard with their numbers in the iteration, in the order of their use."""
        first = len(self.batch.prompts)
        mine = range(shard.shard, len(self.batch.further), self.num_shards)
        limit = (shard.stop - shard.first) * self.batch.max_rounds
        return [(first + place, self.batch.further[place]) for place in mine][:limit]

    def prompts_of(self, shard: ShardRange) -> Sequence[EncodedRow]:
        """Prompts of a shard, in order."""
        return self.batch.prompts[shard.first : shard.stop]

    def find(self, shard: ShardRange) -> Manifest | None:
        """Return the committed shard if it is what this batch asks for."""
        context, batch = self.context, self.batch
        manifest = find_shard(context.store, context.run.name, batch.number, shard.shard, split=batch.split)
        if manifest is None or not manifest.policy_versions:
            return None
        if manifest.policy_versions[0] < batch.oldest_version or manifest.policy_versions[-1] > batch.newest_version:
            return None
        hashes: Mapping[str, str] = manifest.metadata.get("weights_hashes") or {}
        if any(_known_hash(context, int(version)) not in (digest, None) for version, digest in hashes.items()):
            return None  # sampled from weights that were never committed under this version
        is_same = manifest.input_fingerprint == self.fingerprint(shard, hashes)
        return manifest if is_same and manifest.metadata.get("num_shards") == self.num_shards else None

    def requests(self, prompts: Sequence[EncodedRow]) -> list[GenerationRequest]:
        """One request per completion: prompt by prompt, sample by sample."""
        batch = self.batch
        return [
            GenerationRequest(
                prompt_token_ids=prompt.token_ids,
                seed=self.seed(prompt, sample),
                max_tokens=self.context.job.planner.lengths.response,
                temperature=batch.temperature,
                top_p=batch.top_p,
                top_k=batch.top_k,
                stop_token_ids=self.prompts.stop_token_ids,
            )
            for prompt in prompts
            for sample in range(batch.samples_per_prompt)
        ]

    def groups(self, entries: Sequence[tuple[int, EncodedRow]], completions: Sequence[Sampled]) -> list[SampledGroup]:
        """Completions as they were asked for, group by group."""
        size = self.batch.samples_per_prompt
        return [
            SampledGroup(index, prompt, completions[place * size : (place + 1) * size])
            for place, (index, prompt) in enumerate(entries)
        ]

    def entries_of(self, shard: ShardRange) -> list[tuple[int, EncodedRow]]:
        """Prompts of a shard with their numbers in the iteration."""
        return list(enumerate(self.prompts_of(shard), start=shard.first))

    def seed(self, prompt: EncodedRow, sample: int) -> int:
        """Seed of one completion, from its identity alone."""
        batch = self.batch
        # Evaluations of a version that was made anew stay comparable with those before: the same seeds.
        lineage = 0 if batch.split is Split.EVAL else self.lineage
        return sample_seed(self.context.run.seed, batch.number, prompt.row.prompt_id, sample, batch.split, lineage)

    def commit(
        self,
        shard: ShardRange,
        groups: Sequence[SampledGroup],
        info: EngineInfo,
        times: tuple[float, float],
        replica: int,
    ) -> Manifest:
        """Commit one shard.

        Args:
            shard: The shard.
            groups: Its prompts with their completions.
            info: The engine that sampled them.
            times: Start and end of the engine call, Unix seconds; several shards may share it.
            replica: Replica of the plan whose engine that is.
        """
        context, batch = self.context, self.batch
        sampled = [(group, sample, c) for group in groups for sample, c in enumerate(group.completions)]
        texts = self.prompts.decode([completion.token_ids for _, _, completion in sampled])
        shared = self._shared_columns(info, times)
        rows = [
            {
                **shared,
                "prompt_index": group.index,
                "sample_index": sample,
                **self._row(group.prompt, sample, completion, text),
            }
            for (group, sample, completion), text in zip(sampled, texts, strict=True)
        ]
        spans = sorted({(span.policy_version, span.weights_hash) for _, _, done in sampled for span in done.spans})
        hashes = {str(version): digest for version, digest in spans}
        return write_rollouts(
            context.store, context.run.name, batch.number, shard.shard, self.num_shards, rows,
            input_fingerprint=self.fingerprint(shard, hashes),
            created_by=context.created_by,
            split=batch.split,
            attempt=context.request.attempt,
            lineage=self.lineage,
            metadata={
                "weights_hashes": hashes,
                "machine": context.machine.name,
                "replica": replica,
                "started_at": times[0],
                "ended_at": times[1],
                "is_batch_invariant": info.is_batch_invariant,
            },
        )  # fmt: skip

    def _row(self, prompt: EncodedRow, sample: int, completion: Sampled, text: str) -> dict[str, Any]:
        return {
            "prompt_id": prompt.row.prompt_id,
            "prompt_text": prompt.text,
            "completion_text": text,
            "gold_answer": prompt.row.answer,
            "prompt_token_ids": list(prompt.token_ids),
            "completion_token_ids": list(completion.token_ids),
            "sampler_logprobs": list(completion.logprobs),
            "finish_reason": completion.finish_reason,
            "policy_version_first": completion.spans[0].policy_version,
            "policy_version_last": completion.spans[-1].policy_version,
            "token_policy_versions": completion.token_policy_versions,
            "weights_hash": completion.spans[-1].weights_hash,
            "seed": self.seed(prompt, sample),
        }

    def _shared_columns(self, info: EngineInfo, times: tuple[float, float]) -> dict[str, Any]:
        context, batch = self.context, self.batch
        return {
            "temperature": batch.temperature,
            "top_p": batch.top_p,
            "top_k": batch.top_k or None,
            "engine": info.name,
            "engine_version": info.version,
            "dtype": _NUMBER_TYPES.get(info.dtype, info.dtype),
            "logprob_mode": info.logprob_mode,
            "template_hash": self.prompts.template_hash,
            "tokenizer_hash": self.prompts.tokenizer_hash,
            "region": context.machine.region,
            "machine": context.machine.name,
            "gpu_type": context.machine.gpu,
            "started_at": datetime.fromtimestamp(times[0], UTC),
            "ended_at": datetime.fromtimestamp(times[1], UTC),
        }


def _known_hash(context: StageContext, version: int) -> str | None:
    try:
        return resolve_policy(context.home, context.run.name, version).weights_hash
    except ObjectMissingError:
        return None  # no longer kept
