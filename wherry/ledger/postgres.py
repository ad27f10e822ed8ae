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

from wherry.errors import UsageError, missing_extra
from wherry.ledger import schema as tables
from wherry.ledger.connection import POSTGRESQL
from wherry.ledger.schema import BUSY_SECONDS, WRITE
from wherry.remote.probe import ANSWER_SECONDS, SILENT
from wherry.storage.home import without_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.ledger.connection import LedgerConnection

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


# In one message; tables are those of the ledger, whatever else the database has.
_PATH = f"SET LOCAL search_path = {SCHEMA_NAME}, pg_temp"
_READ = f"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; {_PATH}"
_WRITE = (
    f"SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; {_PATH}; "
    f"SELECT set_config('lock_timeout', '{BUSY_SECONDS}s', true), CASE WHEN "
    "current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END"
)
_HAS_SCHEMA = f"SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = '{SCHEMA_NAME}'"  # noqa: S608  our own name


class Postgres:
    """PostgreSQL; the schema version is stored in the comment on the table of statements."""

    dialect = POSTGRESQL

    def __init__(self, driver: Any, options: Mapping[str, Any]) -> None:
        """Choose the database.

        Args:
            driver: the module psycopg.
            options: of its connections.
        """
        self.errors: tuple[type[Exception], ...] = (driver.Error,)
        self._driver, self._options = driver, options

    def connect(self) -> Any:
        """See Backend; nothing is prepared on the server: a pooler may hand each transaction to another session."""
        return self._driver.connect(**self._options, prepare_threshold=None)

    def begin(self, driver: Any, kind: str) -> None:
        """See Backend."""
        driver.execute(_WRITE if kind == WRITE else _READ)
        if kind == WRITE:
            driver.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")

    def version(self, connection: LedgerConnection) -> int:
        """See Backend."""
        note = str(connection.value(_VERSION) or "")
        return int(note.removeprefix(_NOTE)) if note.startswith(_NOTE) else 0

    def create(self, connection: LedgerConnection) -> None:
        """See Backend."""
        if connection.value(_HAS_SCHEMA) is None:
            connection.change(f"CREATE SCHEMA {SCHEMA_NAME}")
        for table in tables.TABLES:
            for text in table.creation(POSTGRESQL):
                connection.change(text)
        for trigger in tables.postgres_triggers(SCHEMA_NAME):
            connection.change(trigger)
        connection.change(f"COMMENT ON TABLE {SCHEMA_NAME}.statement IS '{_NOTE}{tables.SCHEMA}'")

    def busy(self, error: Exception) -> bool:
        """See Backend."""
        state, text = getattr(error, "sqlstate", None), str(error)
        if state is None and "FATAL:" in text:
            return any(words in text for words in _BUSY_WORDS)
        return state is None or state.startswith(_BUSY)

    def is_lost(self, error: BaseException | None) -> bool:
        """See Backend; an error without an SQLSTATE is not the server's."""
        if not isinstance(error, Exception) or not isinstance(error, self._driver.OperationalError):
            return False
        return getattr(error, "sqlstate", None) is None or self.away(error) is not None

    def silence(self, error: Exception) -> str | None:
        """See Backend; only a server gives an SQLSTATE, or refuses a connection with `FATAL`."""
        text = " ".join(str(error).split())
        if getattr(error, "sqlstate", None) is not None or "FATAL:" in text:
            return None
        if "timeout expired" in text:
            return f"{SILENT} within {ANSWER_SECONDS:g} s"
        refused = re.search(r".*failed: ([^?]+?)(?: Is the server running|$)", text)
        return refused[1] if refused else text

    def away(self, error: Exception) -> str | None:
        """See Backend."""
        state, text = getattr(error, "sqlstate", None) or "", " ".join(str(error).split())
        comes = state.startswith(_AWAY) or ("FATAL:" in text and any(words in text for words in _BUSY_WORDS))
        return text if comes else self.silence(error)


def postgres_of(url: str) -> Postgres:
    """The database of a URL.

    Raises:
        MissingExtraError: psycopg is not installed.
        UsageError: the URL names another driver.
        ValueError: the URL is invalid.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise UsageError(
            f"unsupported ledger driver {scheme}",
            uri=without_secrets(url),
            cure="use postgresql://…; the driver is psycopg 3",
        )
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ModuleNotFoundError as error:
        raise missing_extra("psycopg", "postgres", "a ledger in PostgreSQL") from error
    try:
        options = conninfo_to_dict(f"postgresql://{rest.replace(' ', '%20')}")
    except psycopg.Error:  # whose text can have the password
        raise ValueError from None
    for port in str(options.get("port") or "").split(","):
        int(port or "0")
    stated = {"connect_timeout": int(ANSWER_SECONDS), "application_name": "wherry"}
    return Postgres(psycopg, {**stated, **options})
