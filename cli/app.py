"""The `motley` command: command groups put together, errors turned into sentences and exit codes.

A command group is a module of this package with a `typer.Typer` named `app`; a line in `GROUPS` adds it. Modules import
their heavy libraries inside their commands.
"""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Final

import typer

from cli.errors import CommandError, InputError
from plans.errors import PlanMismatchError, PlanningError, SpecError
from stages.errors import StageError
from storage.errors import InvalidInputError, StorageError

GROUPS: Final[tuple[tuple[str, str | None], ...]] = (
    ("cli.deployment", None),
    ("cli.worker", None),
    ("cli.run", None),
    ("cli.resume", None),
    ("cli.run_control", None),
    ("cli.rewind", None),
    ("cli.fork", None),
    ("cli.export", None),
    ("cli.machines", None),
    ("cli.doctor", None),
    ("cli.runs", None),
    ("cli.planner", None),
    ("cli.rent", None),
    ("cli.simulate", None),
    ("cli.calibrate", None),
    ("cli.rollouts", "rollouts"),
)
"""Module and the name under which its commands stand; None puts them beside `motley up`."""


# Some versions of typer carry a click of their own, others use the package: their common public child knows which.
USAGE_ERRORS: Final[tuple[type[Exception], ...]] = tuple(
    kind for kind in typer.BadParameter.__mro__ if issubclass(kind, Exception) and kind.__name__ == "ClickException"
)
"""What a wrong command line raises."""


_REMEDIES: Final = {
    errno.ENOSPC: "free some space, or set MOTLEY_HOME to another disk",
    errno.EDQUOT: "your quota is used up; free some space, or set MOTLEY_HOME to another disk",
    errno.EFBIG: "files may not grow that large here; raise the limit (ulimit -f)",
    errno.EACCES: "choose a path that you may write (MOTLEY_HOME is the deployment's), or ask its owner",
    errno.EPERM: "choose a path that you may write (MOTLEY_HOME is the deployment's), or ask its owner",
    errno.EROFS: "choose a path that can be written (MOTLEY_HOME is the deployment's)",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
}


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
    return 2 if isinstance(error, SpecError | PlanMismatchError | InvalidInputError) else 1


def usage_sentence(error: BaseException) -> str:
    """Return what is wrong with a command line, as a sentence with where to look."""
    command = getattr(getattr(error, "ctx", None), "command_path", "motley")
    text = getattr(error, "format_message", lambda: str(error))()
    return f"{text.rstrip('.')}; see `{command} --help`."


def system_sentence(error: OSError) -> str:
    """Return an error of the operating system as a sentence: what, where, what to do."""
    remedy = _REMEDIES.get(error.errno or 0, "mend that and try again")
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error} (errno {error.errno}); {remedy}."


def main() -> None:
    """Run the command line and end the process with its exit code."""
    command = typer.main.get_command(build_app())
    try:
        code = command.main(prog_name="motley", standalone_mode=False)
    except (CommandError, StageError, StorageError, PlanningError) as error:
        sys.stderr.write(f"{error}\n")
        code = exit_code_of(error)
    except USAGE_ERRORS as error:
        sys.stderr.write(f"{usage_sentence(error)}\n")
        code = InputError.exit_code
    except OSError as error:  # what no command foresaw: a full disk, a file of another user
        sys.stderr.write(f"{system_sentence(error)}\n")
        code = CommandError.exit_code
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write("Interrupted; what was started goes on, see `motley status`.\n")
        code = 130
    sys.exit(code if isinstance(code, int) else 0)
