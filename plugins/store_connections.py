"""Credentials of object stores from Airflow connections, handed to stage processes through their environment only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseHook, Connection

from stages.run_entry import RunEntry
from storage.store_options import options_variable


def store_environment(entry: RunEntry, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a stage process needs in its environment to open the stores of a run.

    Args:
        entry: The run's entry: options for all roots, connections by region.
        environment: Environment of this process, in which options may be set already.

    Raises:
        CredentialsError: What is set already cannot be read.
    """
    return options_variable({root: store_options(entry, region) for region, root in entry.roots.items()}, environment)


def store_options(entry: RunEntry, region: str) -> dict[str, Any]:
    """Return the options of a region's store: the entry's, and the credentials of the region's connection, if any."""
    connection_id = entry.storage_connections.get(region)
    if connection_id is None:
        return dict(entry.storage_options)
    return {**entry.storage_options, **options_of_connection(BaseHook.get_connection(connection_id))}


def options_of_connection(connection: Connection) -> dict[str, Any]:
    """Return a connection as options of fsspec's S3 file system (also for servers that speak S3).

    Login is the access key, password the secret key; of the extras, `endpoint_url`, `region_name` and
    `aws_session_token` are taken, as in connections of Airflow's Amazon provider.
    """
    extra = connection.extra_dejson
    client = {"region_name": extra["region_name"]} if extra.get("region_name") else None
    found = {
        "key": connection.login,
        "secret": connection.password,
        "token": extra.get("aws_session_token"),
        "endpoint_url": extra.get("endpoint_url") or connection.host,
        "client_kwargs": client,
    }
    return {name: value for name, value in found.items() if value}
