"""What the command line raises by itself, each with the exit code of formats.md section 4."""

from __future__ import annotations


class CommandError(Exception):
    """A command that can't be carried out; the message is one sentence with the remedy."""

    exit_code = 1
    """1 = a valid request that can't be met."""


class InputError(CommandError):
    """Bad input."""

    exit_code = 2


class PortInUseError(CommandError):
    """The port asked for belongs to another program."""


class DeploymentError(CommandError):
    """Airflow can't be started or does not come up."""


class RunFailedError(CommandError):
    """A run stopped before its last iteration."""
