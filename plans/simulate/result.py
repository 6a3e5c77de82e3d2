"""What a simulation says: times, utilisation, staleness, and the intervals behind a Gantt picture."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from plans.simulate.recorder import Interval, Recorder
from plans.spec.cluster import Cluster
from plans.spec.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """Outcome of a simulation; seconds are simulated ones."""

    iteration_s: tuple[float, ...]
    """Seconds between the ends of consecutive iterations; the first counts from the start."""
    throughput_samples_s: float
    """Samples per second over the whole simulation."""
    throughput_tokens_s: float
    """Prompt and response tokens per second over the whole simulation."""
    utilisation: dict[str, float]
    """Busy share of each GPU that the plan uses, in [0, 1]."""
    staleness: dict[int, int]
    """Samples trained, by lag in policy versions."""
    producer_wait_s: float
    """Seconds that generation waited for a new enough policy."""
    consumer_wait_s: float
    """Seconds that training waited for rollouts."""
    lost_work: int
    """Replica or task runs that outages ended."""
    intervals: tuple[Interval, ...]
    """Who worked when."""

    @property
    def steady_iteration_s(self) -> float:
        """Mean iteration time without the first one, which fills the pipeline (with one iteration: that one)."""
        steady = self.iteration_s[1:] or self.iteration_s
        return sum(steady) / len(steady)

    def to_document(self) -> dict[str, JsonValue]:
        """Return the JSON-able summary, without the intervals."""
        return {
            "format": "motley.simulation/1",
            "iteration_s": list(self.iteration_s),
            "steady_iteration_s": self.steady_iteration_s,
            "throughput_samples_s": self.throughput_samples_s,
            "throughput_tokens_s": self.throughput_tokens_s,
            "utilisation": dict(self.utilisation),
            "staleness": {str(lag): count for lag, count in sorted(self.staleness.items())},
            "producer_wait_s": self.producer_wait_s,
            "consumer_wait_s": self.consumer_wait_s,
            "lost_work": self.lost_work,
        }


def summarise(
    recorder: Recorder, cluster: Cluster, job: Job, gpus: tuple[int, ...], prompt_tokens: float
) -> SimulationResult:
    """Turn what was recorded into a result; `gpus` are the GPUs that the plan uses."""
    ends = recorder.iteration_ends_s
    total_s = ends[-1]
    busy = dict.fromkeys(gpus, 0.0)
    for interval in recorder.intervals:
        busy[interval.gpu] += max(0.0, min(interval.end_s, total_s) - interval.start_s)
    samples = job.num_samples * len(ends)
    tokens = sum(recorder.tokens_by_iteration[: len(ends)]) + samples * prompt_tokens
    return SimulationResult(
        iteration_s=tuple(end - start for start, end in zip([0.0, *ends], ends, strict=False)),
        throughput_samples_s=samples / total_s,
        throughput_tokens_s=tokens / total_s,
        utilisation={cluster.view.gpu_ids[gpu]: value / total_s for gpu, value in busy.items()},
        staleness=dict(recorder.lags),
        producer_wait_s=recorder.producer_wait_s,
        consumer_wait_s=recorder.consumer_wait_s,
        lost_work=recorder.lost_work,
        intervals=tuple(recorder.intervals),
    )
