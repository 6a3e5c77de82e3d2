from __future__ import annotations

import json

import pytest

pytest.importorskip("airflow.sdk")

from airflow.sdk import BaseHook, Connection
from pydantic import ValidationError

from plugins.store_connections import options_of_connection, store_environment
from stages.launch import stage_environment
from stages.run_entry import RunEntry
from storage.store_options import OPTIONS_VARIABLE, options_of

ENTRY = RunEntry.model_validate(
    {
        "run": "r",
        "roots": {"a": "s3://a/rl", "b": "s3://b/rl"},
        "machines": [{"name": "m", "queue": "m", "region": "a"}],
        "iterations": 1,
        "storage_options": {"endpoint_url": "http://127.0.0.1:9"},
        "storage_connections": {"b": "rl_b"},
    }
)
SECRET = Connection(conn_id="rl_b", conn_type="aws", login="id", password="hush", extra='{"region_name": "x"}')


def test_connection_becomes_options() -> None:
    assert options_of_connection(SECRET) == {"key": "id", "secret": "hush", "client_kwargs": {"region_name": "x"}}


def test_options_of_every_root_reach_the_stage_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseHook, "get_connection", lambda name: {"rl_b": SECRET}[name])
    outer = {"PATH": "/bin", OPTIONS_VARIABLE: json.dumps({"s3://c": {"anon": True}})}

    found = {**stage_environment(outer), **store_environment(ENTRY, outer)}

    assert options_of("s3://a/rl", found) == {"endpoint_url": "http://127.0.0.1:9"}
    assert options_of("s3://b/rl", found)["secret"] == "hush"
    assert options_of("s3://c/x", found) == {"anon": True}
    assert "hush" not in ENTRY.to_json()


def test_connection_of_a_region_without_a_root_is_refused() -> None:
    with pytest.raises(ValidationError, match="which have no root"):
        RunEntry.model_validate({**ENTRY.model_dump(mode="json"), "storage_connections": {"z": "x"}})
