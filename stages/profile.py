"""Stage profile: measure this machine for real (FLOP/s, memory bandwidth, memory, device name, link to its store)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

from stages.context import StageContext, StageOutcome
from stages.errors import StageError
from stages.single_machine_plan import CPU
from storage import layout
from storage.errors import AlreadyPublishedError, ObjectMissingError
from storage.names import escape_name
from storage.runs import read_profile, write_profile
from storage.store import Store

PROFILE_FORMAT: Final = "motley.profile/1"
_SMALL_BYTES: Final = 1024
_LARGE_BYTES: Final = 16 * 2**20
_PROBE_TIMEOUT_S: Final = 300.0


def run_stage(context: StageContext) -> StageOutcome:
    """Measure the machine when it is due, else say which profile stands."""
    number = last_due(context.iteration, context.job.profile.every)
    queue = escape_name(context.machine.queue_name)
    for candidate in dict.fromkeys((context.iteration, number)):
        found = find_profile(context, candidate, queue)
        if found is not None:
            return _outcome(context, candidate, queue, found, reused=True)
    # Not yet measured, or on another cluster: the profile gets this iteration's number.
    document = measure(context)
    with context.phase("commit"):
        try:
            write_profile(context.home, context.run.name, context.iteration, document, queue)
        except AlreadyPublishedError:  # another attempt measured at the same time; its profile stands
            document = read_profile(context.home, context.run.name, context.iteration, queue)
    return _outcome(context, context.iteration, queue, document, reused=False)


def last_due(iteration: int, every: int) -> int:
    """Return the last iteration, up to this one, at which a measurement is due (every 0: the first one only)."""
    return iteration - iteration % every if every else 0


def find_profile(context: StageContext, number: int, queue: str) -> dict[str, Any] | None:
    """Return a machine's profile of that number if it was measured on the present cluster."""
    try:
        document = read_profile(context.home, context.run.name, number, queue)
    except ObjectMissingError:
        return None
    is_usable = document.get("format") == PROFILE_FORMAT and document.get("cluster") == context.run.cluster.fingerprint
    return document if is_usable else None


def measure(context: StageContext) -> dict[str, Any]:
    """Return the profile document of this machine."""
    machine = context.machine
    device = "cpu" if machine.gpu == CPU else "cuda"
    with context.machine_to_itself(), context.phase("measure_device"):
        numbers = _measure_device(device, machine.count if device == "cpu" else os.cpu_count() or 1)
    with context.phase("measure_storage"):
        link = measure_store(context.store, f"_probe/{escape_name(machine.name)}-{context.request.attempt}", context)
    return {
        "format": PROFILE_FORMAT,
        "machine": machine.name,
        "gpu": machine.gpu,
        "cluster": context.run.cluster.fingerprint,
        "measured_at": context.clock.now(),
        **numbers,
        "storage": link,
    }


def measure_store(store: Store, key: str, context: StageContext) -> dict[str, float]:
    """Return seconds of a small round trip and bytes per second of a large one, by writing, reading and deleting."""
    clock = context.clock

    def timed(payload: bytes) -> tuple[float, float]:
        start = clock.monotonic()
        store.publish(key, payload)
        written = clock.monotonic()
        store.read_bytes(key)
        return written - start, clock.monotonic() - written

    try:
        small = min(timed(bytes(_SMALL_BYTES)) for _ in range(3))
        large = timed(os.urandom(_LARGE_BYTES))
    finally:
        store.delete(key)
    return {
        "write_latency_s": small[0],
        "read_latency_s": small[1],
        "write_bytes_per_s": _LARGE_BYTES / max(large[0], 1e-9),
        "read_bytes_per_s": _LARGE_BYTES / max(large[1], 1e-9),
    }


def _measure_device(device: str, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "stages.device_probe", "--device", device, "--threads", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise StageError(
            f"the {device} of this machine can't be measured: the probe ended with exit code {error.returncode} "
            f"({error.stderr.strip()[-500:]}); check the driver and the engines' environment.",
            device=device,
        ) from error
    except subprocess.TimeoutExpired as error:
        raise StageError(
            f"the {device} of this machine can't be measured: the probe did not end within {_PROBE_TIMEOUT_S:.0f} s; "
            "check whether other work keeps the machine busy.",
            device=device,
        ) from error
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def _outcome(context: StageContext, number: int, queue: str, document: dict[str, Any], *, reused: bool) -> StageOutcome:
    metrics = {
        "profile": number,
        "device_name": document["device_name"],
        **{f"flop_per_s_{name}": value for name, value in document["flop_per_s"].items()},
        "memory_bytes_per_s": document["memory_bytes_per_s"],
        "memory_bytes": document["memory_bytes"],
    }
    return StageOutcome(reused=reused, artefacts=(layout.profile(context.run.name, number, queue),), metrics=metrics)
