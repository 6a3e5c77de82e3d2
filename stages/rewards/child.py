"""Main module of a verifier process: `python -m stages.rewards.child READ_FD WRITE_FD`.

Reads one JSON request a line, writes one JSON reply a line. Verifiers may print what they like: standard output isn't
the reply channel.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any, TextIO

from stages.data.rows import PromptRow
from stages.errors import StageError
from stages.rewards.protocol import ScoringItem
from stages.rewards.scorer import Scorer
from stages.rewards.spec import RewardsSpec


def main(read_fd: int, write_fd: int) -> None:
    """Serve until the other side closes."""
    os.dup2(2, 1)
    with os.fdopen(read_fd, encoding="utf-8") as requests, os.fdopen(write_fd, "w", encoding="utf-8") as replies:
        try:
            spec = RewardsSpec.model_validate_json(requests.readline())
            scorer = Scorer(spec)
        except (StageError, ImportError) as error:
            _send(replies, {"fault": str(error)})
            return
        _send(replies, {"ready": True})
        for line in requests:
            # Back-stop for a hang whose parent has died: the kernel ends this process, whatever holds the interpreter.
            signal.setitimer(signal.ITIMER_REAL, 2.0 * spec.deadline_s + 5.0)
            reply = _answer(scorer, json.loads(line))
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            _send(replies, reply)


def _answer(scorer: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "score":
        return {"result": scorer.score(ScoringItem.from_json(request["item"])).to_json()}
    try:
        return {"faults": scorer.gold_faults(PromptRow.from_json(request["row"]))}
    except Exception as error:  # noqa: BLE001 - a verifier may raise anything on a gold answer; reported as a fault
        traceback.print_exc()
        return {"faults": [f"{type(error).__name__}: {error}"]}


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
