"""Line charts, colours, differences and token texts as plain functions."""

from __future__ import annotations

import re

import pytest

from plugins.pages.line_chart import Series, line_chart, ticks
from plugins.pages.text_diff import MAX_WORDS, diff
from plugins.pages.token_colours import logprob_kind, signed_kind
from plugins.pages.token_texts import token_texts
from tests.helpers.page_runs import WORDS, tokenizer_json


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]), (0.2, 0.3, [0.2, 0.225, 0.25, 0.275, 0.3]), (0, 11, [0, 5, 10, 15]),
        (-3, 3, [-4, -2, 0, 2, 4]),
    ],
)  # fmt: skip
def test_ticks_are_round_and_cover_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_chart_puts_values_in_their_place_and_breaks_where_one_is_missing() -> None:
    chart = line_chart("Reward", "", [Series(name="a", points=[(0, 0.0), (1, 1.0), (2, None), (3, 1.0), (4, 0.0)])])
    lines = re.findall(r'<polyline class="line s0" points="([^"]*)"', chart.svg)
    assert lines == ["52.0,166.0 141.5,10.0", "320.5,10.0 410.0,166.0"]
    assert chart.last == [("a", 0.0)]


def test_chart_leaves_out_lines_without_a_value() -> None:
    chart = line_chart("Loss", "", [Series(name="a", points=[(0, None), (1, float("nan"))])])
    assert (chart.series, chart.svg) == ((), "")
    single = line_chart("Loss", "nats", [Series(name="a", points=[(0, 3.0)])])
    assert '<circle class="dot s0"' in single.svg


def test_titles_are_escaped() -> None:
    svg = line_chart('<b> "x"', "", [Series(name="</svg>", points=[(0, 1.0), (1, 2.0)])]).svg
    assert "<b>" not in svg
    assert svg.count("</svg>") == 1


@pytest.mark.parametrize(
    ("logprob", "kind"), [(0.0, "p0"), (-0.1, "p0"), (-0.5, "p1"), (-1.0, "p2"), (-2.0, "p3"), (-4, "p4"), (-9, "p5")]
)
def test_unlikely_tokens_are_darker(logprob: float, kind: str) -> None:
    assert logprob_kind(logprob) == kind


@pytest.mark.parametrize(
    ("value", "kind"), [(None, "none"), (0.0, "z"), (0.05, "q1"), (-0.5, "n2"), (2.0, "q3"), (-1.6, "n3")]
)
def test_signed_numbers_have_a_side_and_a_strength(value: float | None, kind: str) -> None:
    assert signed_kind(value) == kind


def test_difference_names_what_was_removed_and_added() -> None:
    pieces = [(piece.text, piece.kind) for piece in diff("the answer is 2", "the answer is 3!")]
    assert pieces == [("the answer is ", "same"), ("2", "removed"), ("3!", "added")]
    assert diff("", "") == []


def test_rest_of_a_long_text_is_one_piece() -> None:
    words = "a " * MAX_WORDS
    assert [piece.kind for piece in diff(words + "x", words + "y")][-2:] == ["removed", "added"]


def test_token_texts_join_to_the_text_and_are_ids_without_a_tokenizer() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json().decode())
    assert "".join(token_texts(tokenizer, [1, 2, 3, 5])) == " ".join(WORDS[i] for i in (1, 2, 3, 5))
    assert token_texts(None, [7, 8]) == ["#7", "#8"]
    assert token_texts(tokenizer, []) == []
