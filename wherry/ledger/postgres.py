"""The ledger in PostgreSQL, for teams: differences from a SQLite file.

- The tables are in a schema `wherry` of the database, apart from other applications; it is created if the user has the
  permission.
- The single lock of the ledger is an advisory lock of the transaction, taken before anything is read. The transaction
  is READ COMMITTED, so after waiting it reads what the previous holder committed; under REPEATABLE READ it would read
  the state from before the wait. Readers take no lock and are REPEATABLE READ, READ ONLY: one snapshot.
- A commit is on disk when it returns, even if the server's default differs.
- No setting outlives its transaction and nothing is prepared on the server, so a connection pooler can be used.
- The driver is psycopg 3; credentials come from the URL, PGPASSFILE, a service file or PGPASSWORD, and are never
  printed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, create_engine, inspect, make_url

from wherry.errors import UsageError, missing_extra
from wherry.ledger import schema as tables
from wherry.ledger.schema import BUSY_SECONDS, WRITE
from wherry.remote.probe import ANSWER_SECONDS, SILENT
from wherry.storage.home import without_secrets

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.exc import DBAPIError

SCHEMA_NAME = "wherry"
_LOCK = 0x7768657272790001  # `wherry` in ASCII, and the number of the lock
_NOTE = "wherry ledger, schema "
# This query of the catalog sees what was committed during the wait for the lock; to_regclass() may not, as it answers
# from a cache of the session.
_VERSION = (
    "SELECT d.description FROM pg_catalog.pg_class c "  # noqa: S608  our own name
    "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "JOIN pg_catalog.pg_description d ON d.objoid = c.oid AND d.objsubid = 0 "
    "AND d.classoid = 'pg_catalog.pg_class'::regclass "
    f"WHERE n.nspname = '{SCHEMA_NAME}' AND c.relname = 'statement'"
)
# SQLSTATE classes and codes after which a retry may succeed: connection lost, deadlock or serialization failure, too
# many connections or out of resources, shutting down or starting up; 55P03 is a lock timeout.
_BUSY = ("08", "40", "53", "57P", "55P03")
_AWAY = ("08", "57P")  # of these, the server is not there, starts or stops
# The same for a refused connection, whose error has the server's words and no SQLSTATE.
_BUSY_WORDS = ("starting up", "shutting down", "recovery", "too many", "remaining connection slots")


class Postgres:
    """PostgreSQL; the schema version is stored in the comment on the table of statements."""

    prefix = f"{SCHEMA_NAME}."

    def connected(self, connection: Any) -> None:
        """Never prepare statements on the server: a pooler may hand each transaction to another session."""
        connection.prepare_threshold = None

    def begin(self, connection: Connection, kind: str) -> None:
        """See Backend."""
        if kind != WRITE:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            return
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE")
        connection.exec_driver_sql(
            f"SELECT set_config('lock_timeout', '{BUSY_SECONDS}s', true), CASE WHEN "
            "current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END"
        )
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")

    def version(self, connection: Connection) -> int:
        """See Backend."""
        note = str(connection.exec_driver_sql(_VERSION).scalar() or "")
        return int(note.removeprefix(_NOTE)) if note.startswith(_NOTE) else 0

    def create(self, connection: Connection) -> None:
        """See Backend."""
        if not inspect(connection).has_schema(SCHEMA_NAME):
            connection.exec_driver_sql(f"CREATE SCHEMA {SCHEMA_NAME}")
        tables.metadata.create_all(connection)
        for trigger in tables.postgres_triggers(SCHEMA_NAME):
            connection.exec_driver_sql(trigger.replace("%", "%%"))
        connection.exec_driver_sql(f"COMMENT ON TABLE {SCHEMA_NAME}.statement IS '{_NOTE}{tables.SCHEMA}'")

    def busy(self, error: DBAPIError) -> bool:
        """See Backend."""
        state, text = getattr(error.orig, "sqlstate", None), str(error.orig)
        if state is None and "FATAL:" in text:
            return any(words in text for words in _BUSY_WORDS)
        return error.connection_invalidated or state is None or state.startswith(_BUSY)

    def silence(self, error: DBAPIError) -> str | None:
        """See Backend; only a server gives an SQLSTATE, or refuses a connection with `FATAL`."""
        text = " ".join(str(error.orig).split())
        if getattr(error.orig, "sqlstate", None) is not None or "FATAL:" in text:
            return None
        if "timeout expired" in text:
            return f"{SILENT} within {ANSWER_SECONDS:g} s"
        refused = re.search(r".*failed: ([^?]+?)(?: Is the server running|$)", text)
        return refused[1] if refused else text

    def away(self, error: DBAPIError) -> str | None:
        """See Backend."""
        state, text = getattr(error.orig, "sqlstate", None) or "", " ".join(str(error.orig).split())
        comes = state.startswith(_AWAY) or ("FATAL:" in text and any(words in text for words in _BUSY_WORDS))
        return text if comes else self.silence(error)


def connect(url: str) -> tuple[Engine, str, Postgres]:
    """An engine for the ledger, its URI without secrets, and its backend.

    Raises:
        MissingExtraError: psycopg is not installed.
        UsageError: the URL names another driver.
        ArgumentError, ValueError: SQLAlchemy cannot parse the URL.
    """
    parsed = make_url(url)
    if parsed.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise UsageError(
            f"unsupported ledger driver {parsed.drivername}",
            uri=without_secrets(url),
            cure="use postgresql://…; the driver is psycopg 3",
        )
    try:
        engine = create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            pool_size=1,
            max_overflow=-1,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={"connect_timeout": int(ANSWER_SECONDS), "application_name": "wherry"},
            execution_options={"schema_translate_map": {None: SCHEMA_NAME}},
        )
    except ModuleNotFoundError as error:
        raise missing_extra("psycopg", "postgres", "a ledger in PostgreSQL") from error
    return engine, without_secrets(url), Postgres()
