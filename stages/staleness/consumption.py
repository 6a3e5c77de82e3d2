"""What an iteration trains on: its own rollouts and those that wait in the buffer, oldest first, within the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.context import StageContext
from stages.errors import StaleRolloutError, WeightMismatchError
from stages.policy_files import policy_at_home
from stages.rollout_shards import Shard, all_shards, find_in_regions
from stages.sharding import shard_ranges
from stages.staleness.buffer import GroupRef, RolloutBuffer, Taken
from stages.staleness.pacing import version_needed
from storage.checkpoints import load_checkpoint
from storage.errors import ObjectMissingError
from storage.rollout_schema import Family

_IDENTITY = ("row_id", "prompt_index", "policy_version_first")


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """The groups that are decided on at a policy version, and where their rows lie."""

    taken: Taken
    """Batch, withheld groups and the buffer afterwards."""
    rollouts: Sequence[Shard]
    """Rollout shards of the iteration itself, in shard order."""
    families: Mapping[int, Mapping[Family, Sequence[Shard]]]
    """By iteration: the shards that hold the decided groups."""

    def digests(self) -> dict[str, Any]:
        """Return what determines the outcome of training on this, for a fingerprint."""
        return {
            "buffer": self.taken.before.to_json(),
            "shards": {
                str(iteration): {
                    family.value: [shard.manifest.content_digest for shard in shards]
                    for family, shards in sorted(families.items())
                }
                for iteration, families in sorted(self.families.items())
            },
        }

    def rows(self, columns: Mapping[Family, Sequence[str]]) -> list[dict[str, Any]]:
        """Return the joined rows of the batch and of the withheld groups, by (iteration, prompt, sample).

        Raises:
            ObjectMissingError: a rollout has no row in another family.
        """
        decided = {group.identity for group in (*self.taken.batch, *self.taken.withheld)}
        rows: dict[str, dict[str, Any]] = {}
        for iteration, families in self.families.items():
            for shard in families[Family.ROLLOUTS]:
                for row in shard.rows(Family.ROLLOUTS, columns[Family.ROLLOUTS]):
                    if (iteration, row["prompt_index"]) in decided:
                        rows[row["row_id"]] = {**row, "iteration": iteration}
        for families in self.families.values():
            for family, shards in families.items():
                if family is not Family.ROLLOUTS:
                    _join(rows, shards, family, columns[family])
        return sorted(rows.values(), key=lambda row: (row["iteration"], row["prompt_index"], row["sample_index"]))

    def is_withheld(self, row: Mapping[str, Any]) -> bool:
        """Whether a row's group is over the bound."""
        return (row["iteration"], row["prompt_index"]) in {group.identity for group in self.taken.withheld}


def consume(context: StageContext, families: Sequence[Family]) -> Consumption:
    """Decide what iteration k trains on; a function of committed data, so a retry decides the same.

    Args:
        context: Stage train.
        families: Families that training reads, the rollouts among them.

    Raises:
        ObjectMissingError: shards are not committed.
        WeightMismatchError: rollouts come from weights that were never committed under their version.
        StaleRolloutError: a rollout is older than the gate allows, so the gate was passed too early.
    """
    k, job = context.iteration, context.job
    num_shards = len(shard_ranges(job.prompts_per_iteration, job.prompts_per_shard))
    own = {family: all_shards(context, k, num_shards, family) for family in families}
    _check_weights(context, own[Family.ROLLOUTS])
    arrivals = _groups(k, own[Family.ROLLOUTS])
    _check_gate(context, arrivals)
    # Dynamic sampling adds groups in place of those without signal; all of them are decided on.
    num_wanted = job.planner.batch.prompts if job.grpo.dynamic_sampling is None else len(arrivals)
    taken = buffer_at(context, k).take(arrivals, max_staleness=job.max_staleness, wanted=num_wanted)
    found: dict[int, Mapping[Family, Sequence[Shard]]] = {k: own}
    for iteration in sorted({group.iteration for group in (*taken.batch, *taken.withheld)} - {k}):
        groups = [g for g in (*taken.batch, *taken.withheld) if g.iteration == iteration]
        wanted = sorted({group.prompt_index // job.prompts_per_shard for group in groups})
        found[iteration] = {family: _shards(context, iteration, wanted, family) for family in families}
    return Consumption(taken=taken, rollouts=own[Family.ROLLOUTS], families=found)


def buffer_at(context: StageContext, version: int) -> RolloutBuffer:
    """Return the buffer of a committed resume point."""
    checkpoint = load_checkpoint(context.home, context.run.name, version, config_hash=context.job.fingerprint)
    return RolloutBuffer.from_json(checkpoint.manifest.metadata.get("buffer"), version)


def _groups(iteration: int, rollouts: Sequence[Shard]) -> list[GroupRef]:
    oldest: dict[int, int] = {}
    for shard in rollouts:
        for row in shard.rows(Family.ROLLOUTS, _IDENTITY):
            place, version = int(row["prompt_index"]), int(row["policy_version_first"])
            oldest[place] = min(oldest.get(place, version), version)
    return [GroupRef(version, iteration, place) for place, version in sorted(oldest.items())]


def _check_gate(context: StageContext, arrivals: Sequence[GroupRef]) -> None:
    needed = version_needed(context.iteration, context.job.generate_ahead)
    early = [group for group in arrivals if group.oldest_version < needed]
    if early:
        raise StaleRolloutError(
            f"{len(early)} prompt groups of iteration {context.iteration} were sampled from policy version "
            f"{min(early).oldest_version}, but generation may start from version {needed} on; repeat stage generate.",
            needed=needed,
        )


def _check_weights(context: StageContext, rollouts: Sequence[Shard]) -> None:
    for shard in rollouts:
        for version, digest in sorted(shard.manifest.metadata.get("weights_hashes", {}).items()):
            try:
                committed = policy_at_home(context, int(version)).weights_hash
            except ObjectMissingError:
                continue  # no longer kept
            if digest != committed:
                raise WeightMismatchError(
                    f"{shard.manifest.key} says policy version {version} with weights {digest[:12]}, but "
                    f"{committed[:12]} are committed under that version; repeat stage generate.",
                    version=int(version),
                )


def _shards(context: StageContext, iteration: int, indices: Sequence[int], family: Family) -> list[Shard]:
    found = [find_in_regions(context, iteration, index, family) for index in indices]
    missing = [str(index) for index, shard in zip(indices, found, strict=True) if shard is None]
    if missing:
        raise ObjectMissingError(
            f"run {context.run.name}: the rollout buffer refers to shards {', '.join(missing)} of family "
            f"{family.value} of iteration {iteration}, which are gone; run `motley verify {context.run.name}`."
        )
    return [shard for shard in found if shard is not None]


def _join(rows: Mapping[str, dict[str, Any]], shards: Sequence[Shard], family: Family, columns: Sequence[str]) -> None:
    for shard in shards:
        for row in shard.rows(family, columns):
            if row["row_id"] in rows:
                rows[row["row_id"]].update(row)
