"""Epochs of a gang: whole or not at all, first causes, and retries; stages are threads over one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from plans.spec.cluster import Machine
from plans.workflow import RlTask
from stages import gang as gang_module
from stages.engines.gang_place import GangPlace
from stages.errors import ContractError, DeadlineError, EngineError, EngineUnavailableError, NumericsError
from stages.gang import Gang, gang_of
from stages.gang_layout import GangLayout
from storage.gangs import begin_epoch, read_members
from tests.helpers.dict_store import DictStore

LAYOUT = GangLayout(("a", "b", "c"), ((0,), (1, 3), (2,)), (("a/0",), ("b/0", "b/1"), ("c/0",)))
TASK = RlTask.ACTOR_TRAINING


class Engines:
    """What a gang needs of a machine's engines."""

    def __init__(self) -> None:
        self.live: GangPlace | None = None
        self.ended = threading.Event()

    def live_gang(self, _: GangLayout) -> GangPlace | None:
        return self.live

    def end_gang(self) -> None:
        self.live = None
        self.ended.set()


class Machines:
    """Three machines over one store; each `run` is one attempt at the stage on one of them."""

    def __init__(self, *, wait_s: float = 20.0, lost_s: float = 20.0) -> None:
        self.store = DictStore("home")
        self.wait_s, self.lost_s = wait_s, lost_s
        self.engines = {name: Engines() for name in LAYOUT.machines}
        self.pool = ThreadPoolExecutor(8)
        self.attempts = 0

    def gang(self, name: str) -> Gang:
        self.attempts += 1
        cluster = SimpleNamespace(
            machines=[
                Machine(name=each, region="r", gpu="cpu", count=1, address="127.0.0.1", rendezvous_port=29400)
                for each in LAYOUT.machines
            ]
        )
        limits = SimpleNamespace(gang_wait_s=self.wait_s, gang_lost_s=self.lost_s)
        context: Any = SimpleNamespace(
            home=self.store, iteration=3, engines=self.engines[name], job=SimpleNamespace(limits=limits),
            machine=next(machine for machine in cluster.machines if machine.name == name),
            run=SimpleNamespace(name="r", cluster=cluster), phase=lambda _: nullcontext(), log=lambda *_, **__: None,
            request=SimpleNamespace(attempt=f"try{self.attempts}", stage="train"),
        )  # fmt: skip
        return Gang(context, TASK, LAYOUT)

    def run(
        self,
        name: str,
        work: Callable[[Gang], Any],
        *,
        inputs: str = "same",
        is_settled: Callable[[], bool] | None = None,
    ) -> Future[Any]:
        gang = self.gang(name)

        def stage() -> Any:
            with gang.joined(inputs, is_settled or (lambda: False)) as is_formed:
                return work(gang) if is_formed else "settled"

        return self.pool.submit(stage)

    def epochs(self) -> list[list[str]]:
        """Return the machines of every epoch that began."""
        found = []
        while self.store.exists(f"r/iterations/3/gangs/actor_training/{len(found)}.json"):
            found.append(sorted(read_members(self.store, "r", 3, TASK.value, len(found), LAYOUT.machines)))
        return found


def place(gang: Gang) -> GangPlace:
    assert gang.place is not None
    return gang.place


def wait_for_end(machines: Machines, name: str) -> Callable[[Gang], None]:
    """Return work that goes on until the watch ends the machine's engine, as a call that waits for the others does."""

    def work(_: Gang) -> None:
        machines.engines[name].ended.clear()  # a fresh gang begins by ending what is left of old ones
        assert machines.engines[name].ended.wait(20)
        raise EngineUnavailableError("training engine broke off 'train' (Connection closed by peer)")

    return work


def test_machines_agree_on_place_and_the_lead_alone_leads():
    machines = Machines()

    places = [machines.run(name, lambda gang: (place(gang), gang.is_lead)) for name in ("c", "a", "b")]
    (c, _), (a, a_leads), (b, b_leads) = [each.result(30) for each in places]

    assert a == b == c
    assert (a_leads, b_leads) == (True, False)
    assert (a.machines, a.ranks, a.host, a.port) == (LAYOUT.machines, LAYOUT.ranks, "127.0.0.1", 29400)
    assert a.token == "r/3/actor_training/0/try2"  # the lead's attempt


def test_missing_member_fails_all_with_one_sentence_that_names_it():
    machines = Machines(wait_s=1.0)

    waiting = [machines.run(name, lambda _: None) for name in ("a", "b")]
    errors = [each.exception(30) for each in waiting]

    assert all(isinstance(error, DeadlineError) for error in errors)
    for error in errors:
        assert "c did not join the training gang of iteration 3 within 1 s" in str(error)
        assert "train.c runs in Airflow and a worker serves queue c" in str(error)
    # It comes late: the epoch is over, and it begins the next one, where the others' retries find it.
    late = [machines.run(name, lambda gang: gang.epoch) for name in ("c", "a", "b")]
    assert [each.result(30) for each in late] == [1, 1, 1]


def test_failure_of_one_is_the_failure_of_all_with_its_class_and_cause():
    machines = Machines()

    def fail(_: Gang) -> None:
        raise NumericsError("3 steps in a row are not finite", row_ids=["x"])

    futures = {name: machines.run(name, wait_for_end(machines, name)) for name in ("a", "c")}
    failed = machines.run("b", fail)

    assert str(failed.exception(30)) == "3 steps in a row are not finite"
    for future in futures.values():
        error = future.exception(30)
        assert isinstance(error, NumericsError)
        assert "stopped on all machines because b failed: 3 steps in a row are not finite" in str(error)
        assert error.attributes["machine"] == "b"
    assert machines.engines["b"].ended.is_set()


def test_lost_connection_is_not_taken_for_the_cause():
    """The machine that notices first is not the one that failed first."""
    machines = Machines()
    noticed = threading.Event()

    def lose(_: Gang) -> None:
        noticed.set()
        raise EngineError("training rank 0 of 4 failed: RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed")

    def die(_: Gang) -> None:
        assert noticed.wait(20)
        time.sleep(0.5)
        raise EngineUnavailableError("a training rank is gone: rank 3 was killed by SIGKILL")

    futures = [machines.run("a", lose), machines.run("b", die), machines.run("c", wait_for_end(machines, "c"))]
    errors = [str(future.exception(40)) for future in futures]

    assert "because b failed: a training rank is gone: rank 3 was killed by SIGKILL" in errors[0]
    assert errors[1] == "a training rank is gone: rank 3 was killed by SIGKILL"
    assert "because b failed" in errors[2]


def test_retry_of_one_member_restarts_all():
    machines = Machines()
    futures = {name: machines.run(name, wait_for_end(machines, name)) for name in ("a", "b", "c")}
    while machines.epochs() != [["a", "b", "c"]]:
        time.sleep(0.05)

    # b's process died without a word and is tried again: its former attempt is in the epoch already.
    again = machines.run("b", lambda gang: gang.epoch)

    for name in ("a", "c"):
        error = futures[name].exception(30)
        assert isinstance(error, EngineUnavailableError)
        assert "began epoch 1 of the training gang" in str(error)
    retried = [machines.run(name, lambda gang: gang.epoch) for name in ("a", "c")]
    assert [again.result(30), *(each.result(30) for each in retried)] == [1, 1, 1]


def test_silent_member_counts_as_dead(monkeypatch: pytest.MonkeyPatch):
    machines = Machines(lost_s=6.0)
    silent = machines.gang("b")
    monkeypatch.setattr(gang_module, "_REPORT_WAIT_S", 1.0)
    futures = {name: machines.run(name, wait_for_end(machines, name)) for name in ("a", "c")}
    silent._enter("same")
    silent._stop()  # the machine is switched off

    for future in futures.values():
        error = future.exception(30)
        assert isinstance(error, EngineUnavailableError)
        assert "b gave no sign of life for" in str(error)


def test_machine_that_is_gone_is_named_before_it_counts_as_dead(monkeypatch: pytest.MonkeyPatch):
    machines = Machines(lost_s=12.0)  # a sign of life every 2 s
    silent = machines.gang("b")
    monkeypatch.setattr(gang_module, "_REPORT_WAIT_S", 6.0)

    def lose(_: Gang) -> None:
        raise EngineError("training rank 0 of 4 failed: RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed")

    futures = [machines.run(name, lose) for name in ("a", "c")]
    silent._enter("same")
    silent._stop()

    for future in futures:
        assert "b has given no sign of life for" in str(future.exception(30))
        assert "Connection closed" in str(future.exception(30))


def test_members_wait_for_the_lead_and_one_that_dies_after_the_training_is_no_matter():
    machines = Machines(lost_s=3.0)
    published, silent = threading.Event(), machines.gang("c")

    def lead(gang: Gang) -> str:
        gang.may_publish()
        time.sleep(7)  # longer than a silence may last
        published.set()
        return "published"

    def help_lead(gang: Gang) -> bool:
        gang.wait_for_lead(lambda: False)
        return published.is_set()

    futures = [machines.run("a", lead), machines.run("b", help_lead)]
    assert silent._join("same", lambda: False)
    silent._stop()

    assert [future.result(40) for future in futures] == ["published", True]


def test_work_that_is_done_needs_no_gang():
    machines = Machines()
    settled = threading.Event()
    waiting = machines.run("b", lambda _: "trained", is_settled=settled.is_set)

    settled.set()

    assert waiting.result(30) == "settled"


def test_members_with_other_data_refuse():
    machines = Machines()

    futures = [
        machines.run(name, lambda _: None, inputs="x" * 40 if name == "c" else "same") for name in LAYOUT.machines
    ]
    errors = [future.exception(30) for future in futures]

    assert all(isinstance(error, ContractError) for error in errors)
    assert "would train iteration 3 on other data or weights" in str(errors[0])


def test_engines_that_live_in_all_machines_are_used_again_and_else_in_none():
    machines = Machines()
    old = GangPlace(
        token="old", machines=LAYOUT.machines, ranks=LAYOUT.ranks, host="127.0.0.1", port=4, address="127.0.0.1"
    )
    for engines in machines.engines.values():
        engines.live = old

    again = [machines.run(name, place) for name in LAYOUT.machines]
    assert [future.result(30).token for future in again] == ["old"] * 3

    machines.engines["c"].live = None  # its engine was idle for too long
    fresh = [machines.run(name, place) for name in LAYOUT.machines]
    tokens = {future.result(30).token for future in fresh}
    assert len(tokens) == 1
    assert tokens != {"old"}
    assert machines.engines["a"].live is None


def test_epoch_that_nobody_joined_is_joined():
    machines = Machines()
    begin_epoch(machines.store, "r", 3, TASK.value, 1, LAYOUT.machines)  # its beginner died at once

    futures = [machines.run(name, lambda gang: gang.epoch) for name in LAYOUT.machines]

    assert [future.result(30) for future in futures] == [1, 1, 1]


def test_machine_without_address_is_refused():
    context = SimpleNamespace(
        plan=SimpleNamespace(
            tasks={TASK: SimpleNamespace(gpus=("a/0", "b/0"), replicas=())}
        ),
        machine=Machine(name="a", region="r", gpu="cpu", count=1),
        run=SimpleNamespace(
            cluster=SimpleNamespace(machines=[Machine(name=n, region="r", gpu="cpu", count=1) for n in ("a", "b")])
        ),
        plan_number=0,
    )  # fmt: skip

    with pytest.raises(ContractError, match=r"gives a, b no address .* add machines"):
        gang_of(context, TASK, "megatron")
