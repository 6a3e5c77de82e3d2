"""Seconds of an iteration's stages, and the gaps between them, from the results that stage processes left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from stages.contract import StageName, StageRequest, StageResult, StageStatus

RESULTS_PARAM: Final = "results_elsewhere"
"""Parameter of the report's request: results of stages on other machines, whose job folders are not here."""

#: Groups of stages that follow each other in an iteration; the stages of one group run side by side.
ORDER: Final = (
    (StageName.PLAN,),
    (StageName.PREPARE,),
    (StageName.GENERATE,),
    (StageName.INFER, StageName.REWARD_INFERENCE, StageName.REFERENCE_INFERENCE, StageName.CRITIC_INFERENCE),
    (StageName.TRAIN, StageName.CRITIC_TRAINING),
    (StageName.COMMIT_POLICY,),
    (StageName.WEIGHT_SYNC,),
    (StageName.EVALUATE,),
)

#: The first iteration prepares, every n-th evaluates.
_NOT_IN_EVERY_ITERATION: Final = frozenset({StageName.PREPARE, StageName.EVALUATE})

#: Inference that needs no turn, and what waits for it: PPO's values are of the critic that is trained next.
_BEFORE_TURN: Final = (StageName.INFER, StageName.REWARD_INFERENCE, StageName.REFERENCE_INFERENCE)
_IN_TURN: Final = (StageName.CRITIC_INFERENCE, StageName.TRAIN, StageName.CRITIC_TRAINING)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """What is known of an iteration's time."""

    measured_s: Mapping[str, float]
    """Seconds from the first start to the last end, by stage."""
    phases_s: Mapping[str, Mapping[str, float]]
    """Seconds by stage and phase; of several machines the longest."""
    gaps_s: Mapping[str, float]
    """Seconds between the end of a stage's work and the start of the next one's, by `<stage>-><stage>`; of stages side
    by side, from the last end and to the first start, under the name of the group's first stage that there is."""
    started_at: float | None
    """Start of the plan stage, Unix seconds; None when no result was found."""
    ended_at: float | None
    """End of the last stage found."""
    missing: Sequence[str]
    """What could not be measured, one sentence each; of stages that every iteration has."""
    spans: Mapping[StageName, tuple[float, float]] = field(default_factory=dict)
    """First start and last end of each stage, Unix seconds."""
    publish_lag_s: float | None = None
    """Seconds from the commit of the policy to its presence in every region and engine: how late it arrives, which is
    another thing than how old rollouts are."""

    def overhead_fraction(self, waited_s: float = 0.0) -> float | None:
        """Return the share of the iteration in gaps, in [0, 1].

        Args:
            waited_s: Seconds of the gaps in which an earlier iteration was trained: waiting, not overhead. They are
                taken out of the gaps and of the whole.
        """
        if self.started_at is None or self.ended_at is None:
            return None
        whole = self.ended_at - self.started_at - waited_s
        gaps = sum(max(0.0, gap) for gap in self.gaps_s.values()) - waited_s
        return min(1.0, max(0.0, gaps) / whole) if whole > 0 else None


def read_results(state_dir: Path, run: str, iteration: int) -> list[StageResult]:
    """Return the results of an iteration that lie in this machine's job folders; unreadable files are left out."""
    found = []
    for path in sorted((state_dir / "jobs" / run / f"{iteration:06d}").glob("**/result.json")):
        try:
            result = StageResult.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue  # being written, or of another version
        if result.run == run and result.iteration == iteration:
            found.append(result)
    return found


def results_elsewhere(request: StageRequest) -> list[StageResult]:
    """Return the results of other machines that came with a report's request; unreadable ones are left out."""
    given = request.params.get(RESULTS_PARAM)
    found = []
    for document in given if isinstance(given, list) else []:
        try:
            found.append(StageResult.model_validate(document))
        except ValidationError:
            continue  # of another version
    return found


def stage_times(results: Sequence[StageResult]) -> StageTimes:
    """Return the times of the attempts that did the work.

    Of the results of one request, the last one that computed something counts; a repeated stage that only found its
    artefacts does not hide the time that making them took.
    """
    chosen: dict[StageName, list[StageResult]] = {}
    for request in dict.fromkeys((result.stage, result.fingerprint) for result in results):
        same = [r for r in results if (r.stage, r.fingerprint) == request and r.status is StageStatus.OK]
        working = [result for result in same if not result.reused] or same
        if working:
            chosen.setdefault(request[0], []).append(max(working, key=lambda result: result.ended_at))
    spans = {
        stage: (min(r.started_at for r in group), max(r.ended_at for r in group)) for stage, group in chosen.items()
    }
    present = [span for stages in ORDER if (span := _Group.of(stages, spans)) is not None]
    phases: dict[str, dict[str, float]] = {}
    for stage, group in chosen.items():
        for result in group:
            known = phases.setdefault(stage.value, {})
            known.update({name: max(known.get(name, 0.0), seconds) for name, seconds in result.phases_s.items()})
    return StageTimes(
        measured_s={stage.value: end - start for stage, (start, end) in spans.items()},
        phases_s=phases,
        gaps_s={
            f"{before.name.value}->{after.name.value}": after.start - before.end for before, after in pairwise(present)
        },
        started_at=min((span.start for span in present), default=None),
        ended_at=max((span.end for span in present), default=None),
        missing=[
            f"{stages[0].value}: no result of this iteration in this machine's job folders"
            for stages in ORDER
            if not any(stage in spans or stage in _NOT_IN_EVERY_ITERATION for stage in stages)
        ],
        spans=spans,
        publish_lag_s=_publish_lag_s(spans),
    )


def _publish_lag_s(spans: Mapping[StageName, tuple[float, float]]) -> float | None:
    if StageName.COMMIT_POLICY not in spans or StageName.WEIGHT_SYNC not in spans:
        return None
    return max(0.0, spans[StageName.WEIGHT_SYNC][1] - spans[StageName.COMMIT_POLICY][1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Who waited for whom between two iterations that overlap."""

    turn_s: float | None
    """Seconds for which finished rollouts waited until the iteration before was committed."""
    generation_idle_s: float | None
    """Seconds between the end of one iteration's rollouts and the start of the next one's; scheduling included."""
    training_idle_s: float | None
    """Seconds between the commit of one iteration and the start of the next one's training; scheduling included."""


def waits_between(before: StageTimes, after: StageTimes) -> Waits:
    """Return the waits between an iteration and the next one; None where a time is not known on this machine."""
    ready, turn = _Group.of(_BEFORE_TURN, after.spans), _Group.of(_IN_TURN, after.spans)
    sampling, sampled = after.spans.get(StageName.GENERATE), _Group.of(_BEFORE_TURN, before.spans)
    committed = before.spans.get(StageName.COMMIT_POLICY)
    return Waits(
        turn_s=max(0.0, min(committed[1], turn.start) - ready.end) if committed and turn and ready else None,
        generation_idle_s=max(0.0, sampling[0] - sampled.end) if sampling and sampled else None,
        training_idle_s=max(0.0, turn.start - committed[1]) if turn and committed else None,
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Stages side by side as one span."""

    name: StageName
    start: float
    end: float

    @classmethod
    def of(cls, stages: Sequence[StageName], spans: Mapping[StageName, tuple[float, float]]) -> _Group | None:
        present = [stage for stage in stages if stage in spans]
        if not present:
            return None
        return cls(present[0], min(spans[stage][0] for stage in present), max(spans[stage][1] for stage in present))
