"""The rollout buffer: prompt groups that are sampled, and neither trained on nor discarded.

A batch is taken oldest first; groups over the staleness bound are withheld for good and counted; what is left over
waits and takes their place in later batches. The buffer is a list of references to committed rollouts. It is stored
with the resume point of every policy version, so that it goes back with it: nothing is trained on twice, nothing is
lost. Pure functions of their arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stages.errors import ContractError, StaleRolloutError
from stages.staleness.pacing import lag


@dataclass(frozen=True, slots=True, order=True)
class GroupRef:
    """A committed prompt group; the order is the order of consumption."""

    oldest_version: int
    """Least policy version that sampled a token of it."""
    iteration: int
    """Iteration that sampled it."""
    prompt_index: int
    """Its prompt's place in that iteration's batch."""

    @property
    def identity(self) -> tuple[int, int]:
        """Iteration and prompt index."""
        return self.iteration, self.prompt_index


class BufferDocument(BaseModel):
    """The buffer as a document; its counts add up."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["motley.rollout_buffer/1"] = "motley.rollout_buffer/1"
    """Kind and version of this document."""
    version: int = Field(ge=0)
    """As in `RolloutBuffer`, like the other fields."""
    groups: tuple[tuple[int, int, int], ...]
    """Oldest version, iteration and prompt index of each waiting group."""
    num_made: int = Field(ge=0)
    num_trained: int = Field(ge=0)
    num_withheld: int = Field(ge=0)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.num_made != self.num_trained + self.num_withheld + len(self.groups):
            raise ValueError(
                f"{self.num_made} groups were made, but {self.num_trained} trained on, {self.num_withheld} withheld "
                f"and {len(self.groups)} waiting"
            )
        return self

    def to_buffer(self) -> RolloutBuffer:
        """Return the buffer that the document describes."""
        return RolloutBuffer(
            version=self.version,
            groups=tuple(GroupRef(*entry) for entry in self.groups),
            num_made=self.num_made,
            num_trained=self.num_trained,
            num_withheld=self.num_withheld,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBuffer:
    """What waits at a policy version, and what became of everything before."""

    version: int
    """Policy version that will be trained next; the groups of all earlier iterations have arrived."""
    groups: tuple[GroupRef, ...] = ()
    """Waiting groups, in the order of consumption."""
    num_made: int = 0
    """Groups that have arrived since the run began."""
    num_trained: int = 0
    """Groups among them that went into a batch."""
    num_withheld: int = 0
    """Groups among them that were over the bound when their turn came."""

    def take(self, arrivals: Sequence[GroupRef], *, max_staleness: int, wanted: int) -> Taken:
        """Return the batch of this version and the buffer of the next one.

        Args:
            arrivals: All groups of iteration `version`, in any order.
            max_staleness: Largest lag at which a group is still trained on; the age is counted here, at consumption.
            wanted: Groups of a full batch, > 0. With too few fresh groups the batch is smaller.

        Raises:
            StaleRolloutError: a group was sampled from a later version than the one that is trained.
            ContractError: an arrival is of another iteration or comes twice.
        """
        self._check(arrivals)
        waiting = sorted([*self.groups, *arrivals])
        withheld = tuple(g for g in waiting if lag(self.version, g.oldest_version) > max_staleness)
        fresh = waiting[len(withheld) :]  # sorted by version: the withheld ones stand first
        batch, rest = tuple(fresh[:wanted]), tuple(fresh[wanted:])
        after = RolloutBuffer(
            version=self.version + 1,
            groups=rest,
            num_made=self.num_made + len(arrivals),
            num_trained=self.num_trained + len(batch),
            num_withheld=self.num_withheld + len(withheld),
        )
        return Taken(batch=batch, withheld=withheld, wanted=wanted, before=self, after=after)

    def _check(self, arrivals: Sequence[GroupRef]) -> None:
        later = [group for group in arrivals if group.oldest_version > self.version]
        if later:
            raise StaleRolloutError(
                f"a rollout was sampled from policy version {later[0].oldest_version}, but training starts from "
                f"version {self.version}: the iteration was committed before; do not repeat it.",
                version=self.version,
            )
        foreign = sorted({group.iteration for group in arrivals} - {self.version})
        if foreign or len({group.identity for group in arrivals}) != len(arrivals):
            raise ContractError(
                f"version {self.version} takes each group of iteration {self.version} once, but groups of iterations "
                f"{foreign or [self.version]} arrived or one came twice; repeat stage generate."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the document that is stored with a resume point."""
        groups = tuple((group.oldest_version, group.iteration, group.prompt_index) for group in self.groups)
        counts = {"num_made": self.num_made, "num_trained": self.num_trained, "num_withheld": self.num_withheld}
        return BufferDocument(version=self.version, groups=groups, **counts).model_dump(mode="json")

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None, version: int) -> RolloutBuffer:
        """Return the buffer of a resume point; version 0 has none and starts empty.

        Raises:
            ContractError: the document is missing or not one of this version, or its counts don't add up.
        """
        if document is None and version == 0:
            return cls(version=0)
        reason = "it is missing"
        if document is not None:
            try:
                found = BufferDocument.model_validate(document)
            except ValidationError as error:
                reason = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            else:
                if found.version == version:
                    return found.to_buffer()
                reason = f"it is of version {found.version}"
        raise ContractError(
            f"the resume point of version {version} has no usable rollout buffer: {reason}; resume from an earlier "
            "version with `motley resume`, or start a new run."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What became of the groups at one policy version."""

    batch: tuple[GroupRef, ...]
    """Groups to train on, in the order of consumption."""
    withheld: tuple[GroupRef, ...]
    """Groups over the bound; they are never trained on."""
    wanted: int
    """Groups of a full batch."""
    before: RolloutBuffer
    """Buffer at this version."""
    after: RolloutBuffer
    """Buffer at the next version."""

    @property
    def num_refilled(self) -> int:
        """Groups of the batch that an earlier iteration sampled."""
        return sum(group.iteration < self.before.version for group in self.batch)

    def counts(self) -> dict[str, int]:
        """Return counts of groups for the report, `_total` since the run began."""
        after = self.after
        return {
            "groups_in_batch": len(self.batch),
            "groups_missing": self.wanted - len(self.batch),
            "groups_withheld": len(self.withheld),
            "groups_refilled": self.num_refilled,
            "groups_in_buffer": len(after.groups),
            "groups_made_total": after.num_made,
            "groups_trained_total": after.num_trained,
            "groups_withheld_total": after.num_withheld,
        }
