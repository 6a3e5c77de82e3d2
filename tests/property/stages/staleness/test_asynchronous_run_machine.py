"""Gate and buffer against a brute-force event log: random interleavings, crashes, failed iterations, repeated tasks.

The machine is a run as Airflow drives it: iterations are created in order, a few at a time; tasks of different
iterations interleave in any order; a crash loses everything that is not committed; a failed iteration is run again as a
backfill in a slot of its own. Gate and buffer are the real ones. The oracle knows the log only: which group was sampled
from which version, and which group was trained on at which version.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stages.staleness.buffer import GroupRef, RolloutBuffer
from stages.staleness.pacing import may_generate, version_needed

Identity = tuple[int, int]


@dataclass
class Committed:
    """What a crash leaves."""

    head: int = 0
    groups: dict[int, dict[int, GroupRef]] = field(default_factory=dict)
    """Sampled groups by iteration and prompt."""
    resume_points: dict[int, str] = field(default_factory=dict)
    """Buffer document by version; those above the head are not authoritative."""
    batches: dict[int, list[Identity]] = field(default_factory=dict)
    """What was trained on at each version, published with the next version."""


class AsynchronousRun(RuleBasedStateMachine):
    """One run."""

    @initialize(
        bound=st.integers(1, 3), more_lead=st.integers(-2, 2), spare=st.integers(0, 2), batch=st.integers(1, 3),
        total=st.integers(1, 7),
    )  # fmt: skip
    def start(self, bound: int, more_lead: int, spare: int, batch: int, total: int) -> None:
        self.bound, self.spare, self.batch, self.total = bound, spare, batch, total
        self.lead = max(1, bound + (more_lead if spare else min(0, more_lead)))
        self.store = Committed()
        self.heads = [0]
        self.at: dict[int, str] = {}
        """Where each active iteration stands: gate, generate, turn, train, commit."""
        self.failed: set[int] = set()
        self.created = 0

    # What Airflow does

    @precondition(lambda self: self.can_create())
    @rule()
    def create_iteration(self) -> None:
        self.at[self.created] = "gate"
        self.created += 1

    def can_create(self) -> bool:
        scheduled = [k for k in self.at if k not in self.failed]
        return len(scheduled) <= self.lead and self.created < self.total

    @rule(data=st.data())
    def fail_an_iteration(self, data: st.DataObject) -> None:
        """Its slot is free then; later iterations may be created while it is down."""
        if running := sorted(set(self.at) - self.failed):
            self.failed.add(data.draw(st.sampled_from(running)))

    @rule(data=st.data())
    def run_a_failed_iteration_again(self, data: st.DataObject) -> None:
        if self.failed:
            k = data.draw(st.sampled_from(sorted(self.failed)))
            self.failed.discard(k)
            self.at[k] = "gate"

    @rule()
    def crash(self) -> None:
        """Tasks begin anew; what they had committed is found."""
        self.at = dict.fromkeys(self.at, "gate")

    @rule(data=st.data())
    def repeat_training_of_a_committed_iteration(self, data: st.DataObject) -> None:
        if self.store.head:
            before = json.dumps([self.store.resume_points, self.store.batches])
            self.train(data.draw(st.integers(0, self.store.head - 1)))
            assert json.dumps([self.store.resume_points, self.store.batches]) == before

    # What tasks do

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        if moves := self.possible_moves():
            k = data.draw(st.sampled_from(moves))
            self.move(k, lambda low, high: data.draw(st.integers(low, high)))

    def possible_moves(self) -> list[int]:
        return [k for k in sorted(self.at) if k not in self.failed and self.can_move(k)]

    def can_move(self, k: int) -> bool:
        if self.at[k] == "gate":
            return may_generate(k, self.store.head, self.lead)
        if self.at[k] == "turn":
            return may_generate(k, self.store.head, 0)
        return True

    def move(self, k: int, choose: Any) -> None:
        if self.at[k] == "gate":
            self.at[k] = "generate"
        elif self.at[k] == "generate":
            missing = sorted(set(range(self.batch + self.spare)) - set(self.store.groups.get(k, {})))
            if not missing:
                self.at[k] = "turn"
                return
            # A group starts with the newest version, or was interrupted and started with an older allowed one.
            newest = min(self.store.head, k)
            version = choose(version_needed(k, self.lead), newest)
            self.store.groups.setdefault(k, {})[missing[0]] = GroupRef(version, k, missing[0])
        elif self.at[k] == "turn":
            self.at[k] = "train"
        elif self.at[k] == "train":
            self.train(k)
            self.at[k] = "commit"
        else:
            self.store.head = max(self.store.head, k + 1)
            self.heads.append(self.store.head)
            del self.at[k]

    def train(self, k: int) -> None:
        store = self.store
        if store.head > k:
            return  # found trained
        assert store.head == k
        document = store.resume_points.get(k)
        buffer = RolloutBuffer.from_json(None if document is None else json.loads(document), k)
        taken = buffer.take(list(store.groups[k].values()), max_staleness=self.bound, wanted=self.batch)
        point, batch = json.dumps(taken.after.to_json()), [group.identity for group in taken.batch]
        if k + 1 in store.resume_points:  # an attempt that died before the commit
            assert (store.resume_points[k + 1], store.batches[k]) == (point, batch)
        store.resume_points[k + 1], store.batches[k] = point, batch

    # What the log says

    @invariant()
    def never_more_than_the_lead(self) -> None:
        if hasattr(self, "store"):
            assert all(k - self.store.head <= self.lead for k in self.store.groups)

    @invariant()
    def bound_holds_and_nothing_is_trained_twice(self) -> None:
        if hasattr(self, "store"):
            check_log(self.store, self.bound, self.batch)
            assert self.heads == sorted(self.heads)

    def teardown(self) -> None:
        """Whatever happened, the run can go on, and ends at exactly its last iteration."""
        if not hasattr(self, "store"):
            return
        for _ in range(10_000):
            for k in sorted(self.failed):
                self.failed.discard(k)
                self.at[k] = "gate"
            if self.can_create():
                self.create_iteration()
            elif moves := self.possible_moves():
                self.move(moves[0], lambda _, high: high)
            else:
                break
        assert (self.store.head, self.at, sorted(self.store.groups)) == (self.total, {}, list(range(self.total)))
        check_log(self.store, self.bound, self.batch)
        last = RolloutBuffer.from_json(json.loads(self.store.resume_points[self.total]), self.total)
        made = {group.identity for groups in self.store.groups.values() for group in groups.values()}
        trained = {identity for batch in self.store.batches.values() for identity in batch}
        waiting = {group.identity for group in last.groups}
        assert not trained & waiting
        assert last.num_made == len(made) == self.total * (self.batch + self.spare)
        assert last.num_withheld == len(made - trained - waiting)
        assert last.num_trained == len(trained)


def check_log(store: Committed, bound: int, batch: int) -> None:
    """Replay the committed versions with a plain list: each group lives until it is used or too old."""
    pool: list[GroupRef] = []
    used: list[Identity] = []
    for version in range(store.head):
        pool += store.groups[version].values()
        alive = [group for group in pool if 0 <= version - group.oldest_version <= bound]
        expected = [oldest.identity for oldest in _oldest(alive, batch)]
        assert store.batches[version] == expected
        used += expected
        pool = [group for group in alive if group.identity not in expected]
    assert len(used) == len(set(used))


def _oldest(groups: Iterable[GroupRef], count: int) -> list[GroupRef]:
    """Pick one after the other the group that is oldest, earliest sampled, first in its batch."""
    left, chosen = list(groups), []
    while left and len(chosen) < count:
        best = left[0]
        for group in left:
            key = (group.oldest_version, group.iteration, group.prompt_index)
            if key < (best.oldest_version, best.iteration, best.prompt_index):
                best = group
        left.remove(best)
        chosen.append(best)
    return chosen


TestAsynchronousRun = AsynchronousRun.TestCase
TestAsynchronousRun.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
