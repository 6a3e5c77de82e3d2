"""`python -m stages.engines.training.rank_worker FD`: one rank of a training engine other than rank 0.

Reads calls from the inherited socket and ends when it is closed, which also happens when the engine's process dies.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

from stages.engines.training.rank_processes import RankCall, RankReport, RankStart
from stages.engines.training.trainer_kinds import Trainer, trainer_class
from stages.errors import ContractError, NumericsError


def main() -> None:
    """Serve calls until the engine closes the connection or a call fails."""
    connection = Connection(int(sys.argv[1]))
    trainer: Trainer | None = None
    while True:
        try:
            message: RankStart | RankCall = connection.recv()
        except EOFError:
            # No leave-taking: rank 0 may be dead, and then a collective would wait for it.
            os._exit(0)
        report = RankReport()
        try:
            if isinstance(message, RankStart):
                trainer = trainer_class(message.kind)(message.settings, message.place)
            elif trainer is not None:
                getattr(trainer, message.method)(*message.arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine's process must hear of it
            report = _failure(error)
        _send(connection, report)
        if report.failure is not None and not report.is_consistent:
            # Leaves every collective that the others wait in.
            os._exit(1)


def _failure(error: Exception) -> RankReport:
    at_s = time.monotonic()
    with suppress(OSError):  # a full disk must not hide the failure itself
        traceback.print_exc()
        sys.stderr.flush()
    return RankReport(
        failure=f"{type(error).__name__}: {error}",
        is_consistent=isinstance(error, (ContractError, NumericsError)),
        at_s=at_s,
    )


def _send(connection: Connection, report: RankReport) -> None:
    try:
        connection.send(report)
    except OSError:
        os._exit(1)


if __name__ == "__main__":
    main()
