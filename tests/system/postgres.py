"""A PostgreSQL server of its own on loopback, for system tests; the server comes from the system's package."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.loopback import free_port

_PACKAGED = Path("/usr/lib/postgresql")
"""Where Debian keeps the programs of every version, outside the search path."""
PASSWORD = "hunter2-of-the-database"
"""In the server's URL, so that a test can look for it where no secret belongs."""


def server_programs() -> Path | None:
    """Return the directory of `initdb` and `pg_ctl`, None where no server is installed."""
    packaged = sorted(_PACKAGED.glob("*/bin/initdb"), key=lambda file: float(file.parts[-3]))
    if packaged:
        return packaged[-1].parent
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running server."""

    url: str
    """SQLAlchemy URL of its empty database; it holds a password, though loopback needs none."""
    control: tuple[str, ...]
    """Beginning of every `pg_ctl` command."""
    settings: str
    """What it is started with."""
    owner: str | None
    """User that it runs as; None is the caller."""

    def restart(self) -> None:
        """Cut every connection, as a crash would, and come back."""
        self.stop()
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        log = str(Path(self.control[2]).parent / "log")
        _run([*self.control, "-l", log, "-o", self.settings, "start"], self.owner)

    def stop(self) -> None:
        """End it at once, without a checkpoint."""
        _run([*self.control, "-m", "immediate", "stop"], self.owner)


@contextmanager
def postgres_server(folder: Path) -> Iterator[PostgresServer]:
    """Give a new server with an empty database, which ends with the block.

    Args:
        folder: A new directory for its data and log. The server refuses to run as root; root's tests run it as
            `nobody`, who must be able to reach the folder's parents.

    Raises:
        RuntimeError: no server is installed.
    """
    programs = server_programs()
    if programs is None:
        raise RuntimeError("there is no PostgreSQL server; install the package `postgresql`")
    folder.mkdir(parents=True)
    owner = _owner(folder)
    data, port = folder / "data", free_port()
    _run([str(programs / "initdb"), "-D", str(data), "-U", "motley", "--auth=trust", "--no-sync"], owner)
    server = PostgresServer(
        url=f"postgresql+psycopg2://motley:{PASSWORD}@127.0.0.1:{port}/airflow",
        control=(str(programs / "pg_ctl"), "-D", str(data), "-w"),
        settings=f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off",
        owner=owner,
    )
    server.start()
    try:
        client = ["-h", "127.0.0.1", "-p", str(port), "-U", "motley"]
        _run([str(programs / "createdb"), *client, "airflow"], owner)
        yield server
    finally:
        server.stop()


def _owner(folder: Path) -> str | None:
    """Return who must run the server, None for the caller; give them the folder and the way to it."""
    if os.geteuid() != 0:
        return None
    shutil.chown(folder, "nobody", pwd.getpwnam("nobody").pw_gid)
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if not mode & 0o001:
            parent.chmod(mode | 0o001)
    return "nobody"


def _run(command: list[str], owner: str | None) -> None:
    group = None if owner is None else pwd.getpwnam(owner).pw_gid
    done = subprocess.run(
        command, user=owner, group=group, extra_groups=None if owner is None else (), check=False, cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=300.0,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
