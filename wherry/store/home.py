"""The home folder: data that does not belong to a single checkpoint (the ledger, keys, the embedded MLflow store).

One folder, `WHERRY_HOME`, private to its user; by default the platform's folder for user data. Looking up a path
creates nothing; only `ensure_home` creates the folder.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.forks import without_forks
from wherry.errors import storage_error

if TYPE_CHECKING:
    import sqlite3

LEDGER_SCHEMA = 4  # of a ledger's tables and statements
_PRIVATE = 0o700
_SQLITE_SUFFIXES = ("", "-journal", "-wal", "-shm")
_LONGEST_VALUE = 1 << 20  # bytes; of the values that are read without the ledger: digests, places, versions
_COMPUTED = """SELECT lower(name) FROM sqlite_master AS own WHERE type = 'view' OR sql LIKE 'create virtual%'
    OR type = 'table' AND EXISTS (SELECT 1 FROM pragma_table_xinfo(own.name) WHERE hidden > 1)"""  # generated columns
_END_OF_AUTHORITY = re.compile("[/?#]")
_DATABASES = frozenset({"postgresql", "postgres", "mysql", "mariadb", "mssql", "oracle"})


def home() -> Path:
    """The path of the home folder: `WHERRY_HOME`, or the user data folder of the platform."""
    if given := os.environ.get("WHERRY_HOME"):
        return Path(given).expanduser().absolute()
    from platformdirs import user_data_dir  # `wherry --help` needs no folder

    return Path(user_data_dir("wherry", appauthor=False))


def ensure_home() -> Path:
    """The path of the home folder, which is created with access for its user alone if it does not exist.

    Raises:
        StorageError: it cannot be created.
    """
    folder = home()
    try:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        failure = storage_error(error, str(folder))
        failure.cure = "set WHERRY_HOME to a folder that can be written"
        raise failure from error
    return folder


def mlflow_artifacts() -> Path:
    """The folder for the run artifacts of the embedded MLflow store."""
    return home() / "mlflow-artifacts"


def user_name() -> str:
    """The name of the current user; `unknown` if the system has no name for it, as in some containers."""
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def without_secrets(url: str) -> str:
    """A URL as it may be stored and printed: without user, password, query and fragment, which can hold tokens."""
    scheme, separator, rest = url.partition("://")
    rest = _without_user(scheme, rest)
    return scheme + separator + rest.partition("?")[0].partition("#")[0]


def _without_user(scheme: str, rest: str) -> str:
    """The part of a URL after `user:password@`; an `@` in the path of an ordinary URI stays.

    A password is often written unquoted, with a `/`, `?` or `#`. It is distinguished from host and path by what
    follows the first colon: a port is a number. Database URLs have no other `@`.
    """
    authority = _END_OF_AUTHORITY.split(rest, maxsplit=1)[0]
    _host, colon, port = authority.partition(":")
    if not authority or "@" not in rest:
        return rest
    in_password = colon and not port.isdecimal() and not authority.startswith("[")
    if scheme.partition("+")[0] in _DATABASES or ("@" not in authority and in_password):
        return rest.rpartition("@")[2]
    return authority.rpartition("@")[2] + rest[len(authority) :]


def irregular_sqlite_file(file: Path) -> Path | None:
    """A file of a SQLite database that is no regular file, for example a pipe, at which SQLite would wait forever.

    Each file is looked at once: SQLite removes two of them whenever the last connection closes.
    """
    for suffix in _SQLITE_SUFFIXES:
        part = file.with_name(f"{file.name}{suffix}")
        with suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISREG(part.stat().st_mode):
                return part
    return None


@contextmanager
def sqlite_to_read(file: Path, tables: Collection[str], timeout: float = 5) -> Generator[sqlite3.Connection]:
    """A connection that only reads a SQLite file; it creates none, and begins no transaction by itself.

    Args:
        file: the file.
        tables: names of the tables that will be read, in lower case.
        timeout: seconds to wait for a writer.

    Raises:
        sqlite3.Error: the file does not exist, is no database, or computes what one of the tables has: a view, for
            example, can be endless.
    """
    import sqlite3

    if irregular_sqlite_file(file):
        raise sqlite3.DatabaseError("not a regular file")
    named = f"{file.as_uri()}?mode=ro"
    with (
        without_forks(os.path.realpath(file)),
        closing(sqlite3.connect(named, uri=True, timeout=timeout, isolation_level=None)) as connection,
    ):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        if {name for (name,) in connection.execute(_COMPUTED)}.intersection(tables):
            raise sqlite3.DatabaseError("it computes rows or values, which can take forever")
        yield connection


@contextmanager
def ledger_to_read(file: Path, tables: Collection[str]) -> Generator[sqlite3.Connection]:
    """A connection that only reads a ledger in a SQLite file, and never creates one.

    Args:
        file, tables: as for `sqlite_to_read`.

    Raises:
        sqlite3.Error: as for `sqlite_to_read`, or the ledger has another schema.
    """
    import sqlite3

    with sqlite_to_read(file, tables) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != LEDGER_SCHEMA:
            raise sqlite3.DatabaseError(f"the ledger has schema {version}, not {LEDGER_SCHEMA}")
        yield connection


def sqlite_file(url: str) -> Path | None:
    """The file behind a SQLite URL; None for any other URL."""
    scheme, separator, path = url.partition(":///")
    is_file = separator and scheme.partition("+")[0] == "sqlite" and path
    return Path(path.partition("?")[0]).absolute() if is_file else None
