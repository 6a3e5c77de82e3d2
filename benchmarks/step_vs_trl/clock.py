"""Wall and CPU seconds of a piece of work."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Duration of one piece."""

    wall_s: float
    cpu_s: float

    def __add__(self, other: Seconds) -> Seconds:
        """Both pieces."""
        return Seconds(wall_s=self.wall_s + other.wall_s, cpu_s=self.cpu_s + other.cpu_s)


class Clock:
    """Gives the time since it was last asked."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self) -> Seconds:
        """Return the time since the last lap."""
        wall, cpu = time.perf_counter(), time.process_time()
        lap = Seconds(wall_s=wall - self._wall, cpu_s=cpu - self._cpu)
        self._wall, self._cpu = wall, cpu
        return lap
