"""Reading new weights from the region's store as the plan's fan-out says: in its order, so many machines at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from storage.reading_turns import ReadingTurns

if TYPE_CHECKING:
    from stages.context import StageContext

_LONGER_THAN_PREDICTED: Final = 4.0
_AT_LEAST_S: Final = 30.0


@contextmanager
def fan_out_turn(context: StageContext, what: str) -> Iterator[None]:
    """Hold this machine's turn to read for the body; at once where the plan names none, or lets all read together."""
    fan_out, machine = context.plan.fan_out.get(context.machine.region), context.machine.name
    if fan_out is None or machine not in fan_out.order or fan_out.at_once >= len(fan_out.order):
        yield
        return
    turns = ReadingTurns(
        store=context.store, run=context.run.name, machine=machine, order=fan_out.order, at_once=fan_out.at_once,
        reading_counts_s=max(_AT_LEAST_S, _LONGER_THAN_PREDICTED * fan_out.read_s), now=context.clock.now,
    )  # fmt: skip
    with turns.turn(lambda: context.deadline.remaining_s(f"its turn to read {what}")):
        yield
