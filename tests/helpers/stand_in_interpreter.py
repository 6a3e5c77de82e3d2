"""An interpreter for tests of what starts, follows and ends stage processes: it answers a stage's start by script.

The product has no such thing; only the process boundary is tested with it, never a stage.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

_HEAD = """\
#!{python}
import json, os, signal, sys, time
from pathlib import Path
request_file = Path(sys.argv[sys.argv.index("--request") + 1])
from stages.contract import StageFailure, StageRequest, StageResult, StageStatus
request = StageRequest.model_validate_json(request_file.read_text())
started_at = time.time()


def leave(**changes):
    facts = dict(stage=request.stage, run=request.run, iteration=request.iteration, fingerprint=request.fingerprint(),
                 status=StageStatus.OK, started_at=started_at, ended_at=time.time())
    temporary = request_file.with_name("result.tmp")
    temporary.write_text(StageResult(**(facts | changes)).model_dump_json())
    temporary.rename(request_file.with_name("result.json"))


def wait_for(file):
    while not Path(file).exists():
        time.sleep(0.01)


print("stage", request.stage.value, "at work", flush=True)
"""


def write_interpreter(file: Path, body: str) -> Path:
    """Write an executable that runs `body` for `-m stages NAME --request FILE`.

    `body` has `request`, `leave(**changes)`, which writes a result, and `wait_for(file)`.
    """
    file.write_text(_HEAD.format(python=sys.executable) + textwrap.dedent(body), encoding="utf-8")
    file.chmod(0o755)
    return file
