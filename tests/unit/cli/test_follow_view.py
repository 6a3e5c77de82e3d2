from __future__ import annotations

from rich.console import Console

from cli.follow import Progress
from cli.follow_view import FollowView, _clock
from cli.output import Output
from storage.runs import IterationRecord


def progress(*events: str) -> Progress:
    record = IterationRecord(run="demo", iteration=0, metrics={"reward_mean": 0.25, "tokens_per_s": 99.6})
    return Progress(
        iteration=1,
        stages=("generate.gpu",),
        num_done=1,
        records=(record,),
        events=events,
        is_finished=False,
        eta_s=75.0,
    )


def test_without_a_terminal_every_event_is_one_line_on_standard_error() -> None:
    output = Output(is_json=True)
    with output.progress_console.capture() as shown, FollowView(output, 4) as view:
        view.show(progress("iteration 0: plan done 1.0 s", "iteration 0 done (1/4)"))
    assert shown.get() == "iteration 0: plan done 1.0 s\niteration 0 done (1/4)\n"


def test_panel_has_iteration_stage_reward_speed_and_time_left() -> None:
    view = FollowView(Output(is_json=False), 4)
    console = Console(width=100, record=True)
    with console.capture() as shown:
        console.print(view._panel(progress()))
    text = shown.get()
    for part in ("1 of 4", "generate.gpu", "0.250", "100", "1:15"):
        assert part in text


def test_clock_shows_hours_only_when_there_are_any() -> None:
    assert [_clock(0.4), _clock(75.0), _clock(3600.0 + 61.0)] == ["0:00", "1:15", "1:01:01"]
