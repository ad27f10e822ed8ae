"""A PostgreSQL server for tests, started by hand in a temporary folder; skipped with a reason where it is not there."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import gone

_DEBIAN = "/usr/lib/postgresql"


def _binaries() -> Path | None:
    """The folder of initdb and pg_ctl: on the path, or where Debian puts the newest version."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path(_DEBIAN).glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def _user() -> dict[str, str]:
    """PostgreSQL does not run as root: then it runs as the user that its package made."""
    if os.geteuid() != 0:
        return {}
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    return {"user": "postgres", "group": "postgres", "extra_groups": []}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass
class PostgresServer:
    """A server in a folder of its own, which can be killed and started again.

    Attributes:
        url: without a database.
    """

    url: str
    _binaries: Path
    _folder: str
    _port: int
    _user: Mapping[str, Any]

    def start(self) -> None:
        """Start it, also after it was killed; its data lie where they were."""
        options = f"-p {self._port} -c unix_socket_directories= -c listen_addresses=127.0.0.1 -c fsync=off"
        self._call("pg_ctl", "-o", options, "-l", f"{self._folder}/log", "-w", "start")

    def stop(self) -> None:
        """Stop it as fast as it goes."""
        self._call("pg_ctl", "-m", "immediate", "stop")

    def signal(self, number: int) -> None:
        """Send a signal to the server and all processes that serve its connections."""
        postmaster = psutil.Process(int(Path(f"{self._folder}/data/postmaster.pid").read_text().split()[0]))
        for process in [postmaster, *postmaster.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """As if its machine had lost its power; where nobody reaps it, its lock would say that it runs."""
        lock = Path(f"{self._folder}/data/postmaster.pid")
        pid = int(lock.read_text().split()[0])
        self.signal(signal.SIGKILL)
        assert gone([pid])
        lock.unlink()

    def make(self) -> None:
        """Make its data folder."""
        self._call("initdb", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")

    def _call(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), "-D", f"{self._folder}/data", *arguments]
        subprocess.run(
            command, check=True, cwd=self._folder, stdout=subprocess.DEVNULL, timeout=120, **self._user
        )


@contextmanager
def postgres_process() -> Iterator[PostgresServer]:
    """A fresh server, without a database; the caller adds one."""
    binaries, user = _binaries(), _user()
    if binaries is None:
        pytest.skip("initdb and pg_ctl of PostgreSQL are not installed")
    pytest.importorskip("psycopg", reason="psycopg 3 is not installed: pip install 'wherry[postgres]'")
    with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
        if user:
            shutil.chown(folder, "postgres", "postgres")
        port = _free_port()
        server = PostgresServer(f"postgresql://postgres@127.0.0.1:{port}", binaries, folder, port, user)
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a fresh server, without a database; the caller adds one."""
    with postgres_process() as server:
        yield server.url


def new_database(server: str, name: str) -> str:
    """The URL of a new, empty database."""
    import psycopg

    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return f"{server}/{name}"
