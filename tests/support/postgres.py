"""A PostgreSQL server for tests, started by hand in a temporary folder; skipped with a reason where it is not there."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a fresh server, without a database; the caller adds one."""
    binaries, user = _binaries(), _user()
    if binaries is None:
        pytest.skip("initdb and pg_ctl of PostgreSQL are not installed")
    pytest.importorskip("psycopg", reason="psycopg 3 is not installed: pip install 'wherry[postgres]'")
    with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
        if user:
            shutil.chown(folder, "postgres", "postgres")
        data, port = f"{folder}/data", _free_port()

        def call(program: str, *arguments: str) -> None:
            command = [str(binaries / program), "-D", data, *arguments]
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=120, **user)

        call("initdb", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        call("pg_ctl", "-o", options, "-l", f"{folder}/log", "-w", "start")
        try:
            yield f"postgresql://postgres@127.0.0.1:{port}"
        finally:
            call("pg_ctl", "-m", "immediate", "stop")


def new_database(server: str, name: str) -> str:
    """The URL of a new, empty database."""
    import psycopg

    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return f"{server}/{name}"
