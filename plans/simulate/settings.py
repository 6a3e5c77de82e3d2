"""What is simulated: how many iterations, how long the answers are, how efficient the hardware is, what breaks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from plans.errors import Fault, FaultKind, SpecError
from plans.spec.cluster import Cluster
from plans.spec.job import Job
from plans.workflow import TaskKind


class Dispatch(StrEnum):
    """How samples reach generation replicas."""

    PLANNED = "planned"
    """Each replica gets the plan's number of samples at the start."""
    QUEUE = "queue"
    """Replicas take samples from one queue when they have room."""
    BUCKETS = "buckets"
    """Each replica gets the plan's number of samples, the longest ones where the plan says so (`lengths`): as if every
    length were predicted exactly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Share of its peak that a device or link reaches; 1 everywhere is the paper's assumption."""

    compute: float = 1.0
    """Of dense FLOP/s, above 0."""
    compute_by_kind: Mapping[TaskKind, float] = field(default_factory=dict)
    """Of dense FLOP/s by kind of task, above 0; an absent kind has `compute`."""
    hbm: float = 1.0
    """Of memory bandwidth, above 0."""
    network: float = 1.0
    """Of link bandwidth, above 0."""
    network_between: float | None = None
    """Of the bandwidth of links between machines, above 0; None = `network`."""
    step_overhead_s: float = 0.0
    """Fixed seconds per decode step and per micro-batch pass of a stage."""
    decode_layer_overhead_s: float = 0.0
    """Fixed seconds per layer of a stage in every decode step."""

    def compute_of(self, kind: TaskKind) -> float:
        """Return the share of FLOP/s that a kind of task reaches."""
        return self.compute_by_kind.get(kind, self.compute)

    def faults(self, place: str) -> list[Fault]:
        """Return what is no share or no time in it."""
        shares = {"compute": self.compute, "hbm": self.hbm, "network": self.network}
        shares |= {f"compute_by_kind[{kind.value}]": share for kind, share in self.compute_by_kind.items()}
        if self.network_between is not None:
            shares["network_between"] = self.network_between
        times = {
            "step_overhead_s": self.step_overhead_s,
            "decode_layer_overhead_s": self.decode_layer_overhead_s,
        }
        return [
            *(fault for name, share in shares.items() for fault in _number(f"{place}.{name}", share, above=0.0)),
            *(fault for name, time in times.items() for fault in _number(f"{place}.{name}", time, least=0.0)),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A GPU that is slower than its type says, all the time."""

    gpu: str
    """GPU id."""
    slowdown: float
    """Factor on every service time, >= 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A machine that is away for a while; work in progress on it is lost, finished samples are not."""

    machine: str
    """Machine name."""
    at_s: float
    """Simulated time at which it goes."""
    down_s: float
    """Seconds until it is back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSettings:
    """Everything that a simulation needs beside cluster, job and plan."""

    iterations: int = 3
    """Iterations to complete, >= 1."""
    seed: int = 0
    """Seed of the response lengths."""
    lengths: tuple[int, ...] | None = None
    """Observed response lengths to draw from, tokens; None = the job's distribution (log-normal with the mean and
    standard deviation of `lengths`, or the maximum where no mean is given)."""
    dispatch: Dispatch = Dispatch.PLANNED
    """How samples reach replicas."""
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)
    """By GPU type; an absent type runs at peak."""
    stragglers: tuple[Straggler, ...] = ()
    """Slow GPUs."""
    failures: tuple[Failure, ...] = ()
    """Outages."""

    def check(self, cluster: Cluster) -> None:
        """Refuse settings that cannot be simulated on a cluster, all faults together."""
        machines, types = [machine.name for machine in cluster.machines], {machine.gpu for machine in cluster.machines}
        faults = [
            *_number("iterations", self.iterations, least=1),
            *(f for s in self.stragglers for f in _known(f"stragglers[{s.gpu}].gpu", s.gpu, cluster.view.gpu_index)),
            *(f for s in self.stragglers for f in _number(f"stragglers[{s.gpu}].slowdown", s.slowdown, least=1)),
            *(f for x in self.failures for f in _known(f"failures[{x.machine}].machine", x.machine, machines)),
            *(f for x in self.failures for f in _number(f"failures[{x.machine}].down_s", x.down_s, least=0)),
            *(f for x in self.failures for f in _number(f"failures[{x.machine}].at_s", x.at_s, least=0)),
            *(f for name, share in self.efficiency.items() for f in share.faults(f"efficiency[{name}]")),
            *(f for name in self.efficiency for f in _known(f"efficiency[{name}]", name, types)),
        ]
        if self.lengths is not None and (not self.lengths or min(self.lengths) < 1):
            faults.append(
                Fault(
                    field="lengths",
                    found=f"{len(self.lengths)} values, smallest {min(self.lengths, default=0)}",
                    rule="response lengths are at least one whole number >= 1",
                    remedy="remove the others",
                    kind=FaultKind.OUT_OF_RANGE,
                )
            )
        if faults:
            raise SpecError("simulation settings", faults)


def response_lengths(job: Job, settings: SimulationSettings, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw the response length of every sample of one iteration, in tokens, as an array [job.num_samples].

    A log-normal distribution has the job's mean m and standard deviation s when its parameters are
    sigma^2 = ln(1 + s^2/m^2) and mu = ln(m) - sigma^2/2; draws are cut to [1, lengths.response], which lowers the
    mean a little where the tail passes the limit.
    """
    longest, count = job.lengths.response, job.num_samples
    if settings.lengths is not None:
        drawn: NDArray[np.int64] = rng.choice(np.array(settings.lengths, dtype=np.int64), size=count)
        return np.minimum(drawn, longest).astype(np.int64).astype(np.int64)
    mean = job.lengths.response_mean
    if mean is None:
        return np.full(count, longest, dtype=np.int64)
    spread = job.lengths.response_std or 0.0
    sigma_squared = float(np.log1p((spread / mean) ** 2))
    samples = rng.lognormal(np.log(mean) - sigma_squared / 2, np.sqrt(sigma_squared), size=count)
    return np.clip(np.rint(samples), 1, longest).astype(np.int64)


def _number(name: str, value: float, *, least: float = -np.inf, above: float = -np.inf) -> list[Fault]:
    if np.isfinite(value) and value >= least and value > above:
        return []
    rule = f"it is a finite number > {above:g}" if above > least else f"it is a finite number >= {least:g}"
    return [Fault(field=name, found=str(value), rule=rule, remedy="correct it", kind=FaultKind.OUT_OF_RANGE)]


def _known(name: str, value: str, known: Collection[str]) -> list[Fault]:
    if value in known:
        return []
    rule = f"the cluster has {len(known)} of these, such as {min(known)!r}"
    return [Fault(field=name, found=repr(value), rule=rule, remedy="name one of them", kind=FaultKind.UNKNOWN_NAME)]
