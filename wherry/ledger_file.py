"""The ledger's database: how it is opened, made, locked and kept durable.

SQLite in WAL mode with `synchronous=FULL`: a commit is on the disk when it returns, readers go on meanwhile, and
writers of all processes wait for one another. What is written in it is the business of `wherry.ledger`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import NullPool

from wherry import ledger_schema as tables
from wherry.errors import CorruptError, StorageError, UnsupportedError
from wherry.home import ensure_home, ledger_url, sqlite_file, without_secrets

if TYPE_CHECKING:
    from collections.abc import Generator

_BUSY_SECONDS = 60
_BEGIN = "wherry_begin"  # execution option that chooses the kind of transaction


class Ledger:
    """An opened ledger; get one from `open_ledger`."""

    def __init__(self, engine: Engine, uri: str) -> None:
        self._engine = engine
        self.uri = uri

    @contextmanager
    def write(self) -> Generator[Connection]:
        """A transaction that holds the write lock from its first moment."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def read(self) -> Generator[Connection]:
        """A transaction that sees one state of the ledger."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def _transaction(self, begin: str) -> Generator[Connection]:
        engine = self._engine.execution_options(**{_BEGIN: begin})
        with _storage_errors(self.uri), engine.begin() as connection:
            yield connection


@contextmanager
def open_ledger(url: str | None = None) -> Generator[Ledger]:
    """Open the ledger, and make it where there is none.

    Args:
        url: SQLAlchemy URL; `WHERRY_LEDGER` or the file in the home by default.

    Raises:
        StorageError: it cannot be read or written.
        UnsupportedError: the database is not SQLite.
        CorruptError: it was written by a newer wherry.
    """
    chosen = url or ledger_url()
    file = sqlite_file(chosen)
    if file is None:
        raise UnsupportedError(
            "this version keeps its ledger in SQLite files",
            uri=without_secrets(chosen),
            cure="set WHERRY_LEDGER to sqlite:////absolute/path.db",
        )
    if url is None:
        ensure_home()
    engine = create_engine(chosen, poolclass=NullPool, connect_args={"timeout": _BUSY_SECONDS})
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    try:
        ledger = Ledger(engine, str(file))
        _create(ledger)
        yield ledger
    finally:
        engine.dispose()


def _create(ledger: Ledger) -> None:
    """Tables and triggers, once; the number of the schema is kept where SQLite keeps such numbers."""
    with ledger.read() as connection:
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    if version > tables.SCHEMA:
        raise CorruptError(f"ledger of schema {version}", uri=ledger.uri, cure="use a newer wherry")
    if version == tables.SCHEMA:
        return
    with ledger.write() as connection:
        tables.metadata.create_all(connection)
        for trigger in tables.TRIGGERS:
            connection.exec_driver_sql(trigger)
        connection.exec_driver_sql(f"PRAGMA user_version = {tables.SCHEMA}")


def _configure(connection: Any, _record: object) -> None:
    """Leave transactions to us, and make every commit durable; WAL lets readers go on meanwhile."""
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout={_BUSY_SECONDS * 1000}",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


@contextmanager
def _storage_errors(uri: str) -> Generator[None]:
    try:
        yield
    except DatabaseError as error:
        busy = "locked" in str(error.orig)
        raise StorageError(
            f"the ledger cannot be used: {error.orig}",
            uri=uri,
            cure="try again"
            if busy
            else "check that the file is a ledger and can be written, or set WHERRY_LEDGER",
            retryable=busy,
        ) from error
