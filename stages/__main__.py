"""The stage process: `python -m stages NAME --request FILE`, and `python -m stages check --job FILE --cluster FILE`.

The only place that turns an exception into a result document and an exit code: 0 done, 1 the request was valid but
failed, 2 bad input, 143 ended by SIGTERM. The result is written beside the request, at once and wholly.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from pydantic import JsonValue, ValidationError

from plans.errors import PlanningError, SpecError
from stages.context import StageContext, StageOutcome, open_context
from stages.contract import StageFailure, StageName, StageRequest, StageResult, StageStatus
from stages.errors import ContractError, DeadlineError, EngineUnavailableError, StageError, WeightMismatchError
from stages.registry import stage_function
from stages.timing import Clock, Deadline, PhaseTimer
from storage.errors import InvalidInputError, SchemaVersionError, StorageError, TransientStorageError

RESULT_NAME: Final = "result.json"
"""File name of the result, in the request's folder."""

EXIT_TERMINATED: Final = 128 + signal.SIGTERM
"""Exit code after SIGTERM."""

_RETRYABLE: Final = (EngineUnavailableError, DeadlineError, WeightMismatchError, TransientStorageError)
"""Another attempt can succeed: engines are replaced, waits repeated."""

_BAD_INPUT: Final = (SpecError, InvalidInputError, SchemaVersionError)
"""Errors of other packages that mean bad input."""

logger = logging.getLogger("stages")


class Terminated(BaseException):
    """SIGTERM arrived; not an error of the stage: the work is given up where it stands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one stage or the preflight check; return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it writes a line for each poll of a starting engine
    if options.stage == "check":
        from stages.check import check_command

        return check_command(options.job, options.cluster, options.cache, is_json=options.json, root=options.root)
    if options.request is None:
        sys.stderr.write(f"stage {options.stage} needs --request FILE with a motley.stage-request/1 document.\n")
        return 2
    return run_request(StageName(options.stage), options.request, Clock())


def run_request(stage: StageName, request_path: Path, clock: Clock) -> int:
    """Do the work of one request file, leave the result beside it, return the exit code."""
    try:
        request = read_request(request_path, stage)
    except ContractError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    started_at, timer = clock.now(), PhaseTimer(clock=clock)
    deadline = Deadline(clock=clock, ends_at=clock.monotonic() + request.deadline_s)
    outcome, failure, exit_code = StageOutcome(), None, 0
    names = (request.run, request.iteration, stage, request.attempt)
    try:  # a signal can arrive as soon as its handler stands
        _install_signal_handlers(request, timer)
        logger.info("run=%s iteration=%d stage=%s attempt=%s start", *names)
        outcome = _work(request, timer, deadline)
    except (Exception, Terminated) as error:
        failure, exit_code = failure_of(error), exit_code_of(error)
        is_expected = isinstance(error, StageError | StorageError | PlanningError | Terminated)
        logger.log(logging.ERROR, "%s", failure.message, exc_info=None if is_expected else error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    result = StageResult(
        stage=stage,
        run=request.run,
        iteration=request.iteration,
        fingerprint=request.fingerprint(),
        status=StageStatus.FAILED if failure else StageStatus.OK,
        reused=outcome.reused,
        artefacts=list(outcome.artefacts),
        metrics=outcome.metrics,
        started_at=started_at,
        ended_at=clock.now(),
        phases_s={name: round(seconds, 6) for name, seconds in timer.phases_s.items()},
        error=failure,
    )
    write_result(request_path.parent / RESULT_NAME, result)
    logger.info(
        "run=%s iteration=%d stage=%s attempt=%s %s reused=%s seconds=%.3f phases=%s",
        *names, result.status, result.reused, result.ended_at - started_at, json.dumps(result.phases_s),
    )  # fmt: skip
    return exit_code


def _work(request: StageRequest, timer: PhaseTimer, deadline: Deadline) -> StageOutcome:
    with timer.phase("open"):
        context: StageContext = open_context(request, timer, deadline)
        function = stage_function(request.stage)
    try:
        context.lease.take()
        return function(context)
    finally:
        context.close()


def read_request(path: Path, stage: StageName) -> StageRequest:
    """Return the request in a file.

    Raises:
        ContractError: not readable, not a request, or a request of another stage.
    """
    try:
        request = StageRequest.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ContractError(f"request {path} can't be read ({error}); give the path of an existing file.") from error
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, f['loc'])) or 'document'}: {f['msg']}" for f in error.errors())
        raise ContractError(f"request {path} is no motley.stage-request/1 document: {faults}.") from error
    if request.stage is not stage:
        raise ContractError(f"request {path} is for stage {request.stage}, but {stage} was started; use its own stage.")
    return request


def write_result(path: Path, result: StageResult) -> None:
    """Write the result to a file, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(result.model_dump_json(indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def failure_of(error: BaseException) -> StageFailure:
    """Return an exception as the record that another process can act on."""
    kind = type(error)
    attributes = dict(error.attributes) if isinstance(error, StageError) else {}
    if isinstance(error, StorageError) and error.key is not None:
        attributes["key"] = error.key
    module = "stages.__main__" if kind.__module__ == "__main__" else kind.__module__
    return StageFailure(
        type=f"{module}.{kind.__qualname__}",
        message=str(error) or kind.__qualname__,
        attributes={name: _json_value(value) for name, value in attributes.items()},
        is_retryable=isinstance(error, (*_RETRYABLE, Terminated)),
    )


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a stage process that ends with this exception."""
    if isinstance(error, Terminated):
        return EXIT_TERMINATED
    if isinstance(error, StageError):
        return error.exit_code
    return 2 if isinstance(error, _BAD_INPUT) else 1


def _json_value(value: object) -> JsonValue:
    with suppress(TypeError, ValueError):
        plain: JsonValue = json.loads(json.dumps(value, allow_nan=False))
        return plain
    return str(value)


def _install_signal_handlers(request: StageRequest, timer: PhaseTimer) -> None:
    def on_alarm(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise DeadlineError(
            f"stage {request.stage} of iteration {request.iteration} did not end within {request.deadline_s:.0f} s; it "
            f"was in phase {timer.current or 'start'}; it is tried again, or raise limits.stage_deadline_s.",
            phase=timer.current, deadline_s=request.deadline_s,
        )  # fmt: skip

    def on_term(_signal: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the result is being written
        raise Terminated(f"stage {request.stage} was ended by SIGTERM in phase {timer.current or 'start'}.")

    signal.signal(signal.SIGALRM, on_alarm)
    signal.signal(signal.SIGTERM, on_term)
    signal.setitimer(signal.ITIMER_REAL, request.deadline_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages", description="Run one stage of an RL iteration.")
    parser.add_argument("stage", choices=[*(name.value for name in StageName), "check"], help="stage to run")
    parser.add_argument("--request", type=Path, help="file with the motley.stage-request/1 document")
    parser.add_argument("--job", type=Path, help="job file (check)")
    parser.add_argument("--cluster", type=Path, help="cluster file (check)")
    parser.add_argument("--cache", type=Path, help="folder in which the encoded prompts stay for the run (check)")
    parser.add_argument("--root", help="store of regions for which neither file names one (check)")
    parser.add_argument("--json", action="store_true", help="print one JSON document (check)")
    return parser


def _end_process(exit_code: int) -> NoReturn:
    """End without waiting for threads that still wait for an engine (after a deadline or SIGTERM)."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    _end_process(main())
