"""Options of stores by root, from the environment."""

from __future__ import annotations

import json

import pytest

from storage.errors import CredentialsError
from storage.s3_store import s3_options
from storage.store import open_store
from storage.store_options import OPTIONS_VARIABLE, options_of, options_variable

SET = {OPTIONS_VARIABLE: json.dumps({"s3://a": {"key": "1"}, "s3://a/rl": {"key": "2"}, "s3://ab": {"key": "3"}})}


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("s3://a", "1"),
        ("s3://a/", "1"),
        ("s3://a/x", "1"),
        ("s3://a/rl", "2"),
        ("s3://a/rl/x", "2"),
        ("s3://ab/rl", "3"),
    ],
)
def test_longest_root_wins_by_whole_segments(url: str, key: str) -> None:
    assert options_of(url, SET) == {"key": key}


def test_root_without_options_has_none() -> None:
    assert options_of("s3://b", SET) == options_of("s3://b", {}) == {}


def test_variable_is_added_to_what_is_set() -> None:
    found = options_variable({"s3://a": {"secret": "x"}, "s3://n": {}}, SET)
    assert options_of("s3://a", found) == {"key": "1", "secret": "x"}
    assert options_of("s3://ab", found) == {"key": "3"}
    assert options_variable({"s3://n": {}}) == {}


@pytest.mark.parametrize("text", ['{"s3://a": "hush', '["hush"]', '{"s3://a": "hush"}'])
def test_unreadable_variable_is_an_error_that_shows_no_secret(text: str) -> None:
    with pytest.raises(CredentialsError, match="no JSON object of options by root") as caught:
        options_of("s3://a", {OPTIONS_VARIABLE: text})
    assert "hush" not in str(caught.value)


def test_opened_store_takes_options_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({f"file://{tmp_path}": {"is_synced": False}}))
    store = open_store(f"file://{tmp_path}/x", is_retrying=False)
    assert store._is_synced is False  # type: ignore[attr-defined]


def test_users_options_of_the_s3_client_win_over_what_is_asked_of_it() -> None:
    own = {"retries": {"max_attempts": 9}, "connect_timeout": 1, "read_timeout": None, "signature_version": "s3v4"}
    asked = s3_options({"key": "k", "config_kwargs": own})
    config = asked["config_kwargs"]
    assert asked["key"] == "k"
    assert (config["retries"], config["connect_timeout"]) == ({"max_attempts": 9}, 1)
    assert (config["read_timeout"], config["signature_version"]) == (60, "s3v4")
    assert s3_options({})["config_kwargs"]["retries"]["total_max_attempts"] == 1
