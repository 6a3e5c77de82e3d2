"""The `motley` command: command groups put together, errors turned into sentences and exit codes.

A command group is a module of this package with a `typer.Typer` named `app`; a line in `GROUPS` adds it. Modules import
their heavy libraries inside their commands.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

import click
import typer

from cli.errors import CommandError
from plans.errors import PlanningError, SpecError
from stages.errors import StageError
from storage.errors import InvalidInputError, StorageError

GROUPS: Final[tuple[tuple[str, str | None], ...]] = (
    ("cli.deployment", None),
    ("cli.run", None),
    ("cli.resume", None),
    ("cli.runs", None),
    ("cli.simulate", None),
    ("cli.rollouts", "rollouts"),
)
"""Module and the name under which its commands stand; None puts them beside `motley up`."""


def build_app() -> typer.Typer:
    """Return the whole command line."""
    whole = typer.Typer(
        name="motley",
        help="Reinforcement-learning post-training of language models on mixed GPUs, run as an Airflow pipeline.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for module, name in GROUPS:
        group: typer.Typer = importlib.import_module(module).app
        if name is None:
            whole.add_typer(group)
        else:
            whole.add_typer(group, name=name)
    return whole


def exit_code_of(error: Exception) -> int:
    """Return the exit code of an error: 1 = a valid request that can't be met, 2 = bad input."""
    if isinstance(error, CommandError | StageError):
        return error.exit_code
    return 2 if isinstance(error, SpecError | InvalidInputError) else 1


def main() -> None:
    """Run the command line and end the process with its exit code."""
    command = typer.main.get_command(build_app())
    try:
        code = command.main(standalone_mode=False)
    except (CommandError, StageError, StorageError, PlanningError) as error:
        sys.stderr.write(f"{error}\n")
        code = exit_code_of(error)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("Interrupted; what was started goes on, see `motley status`.\n")
        code = 130
    sys.exit(code if isinstance(code, int) else 0)
