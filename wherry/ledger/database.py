"""The ledger's database: opening, creation, locking, durability and queries.

SQLite, the default, is one file in WAL mode with `synchronous=FULL`: a commit is on disk when it returns, readers
are not blocked, and writers of all processes wait for one another. PostgreSQL is for teams. Both give the same
guarantees:

- `write()` holds the single lock of the ledger from its start, so appends happen strictly one after the other.
- `read()` sees a consistent snapshot of the ledger, whatever is appended meanwhile.

Queries are SQL that both understand, with parameters such as `:digest`. One thing differs and has a word of its own:
`column IN (:*digests)` finds one of many values, which are a single parameter, since drivers limit how many a query
has. SQLite stores any type in any column, so what it returns is checked by the name of the column (`schema.TYPES`).

Of PostgreSQL:

- The tables are in a schema `wherry` of the database, apart from other applications; it is created if the user has the
  permission.
- The single lock of the ledger is an advisory lock of the transaction, taken before anything is read. The transaction
  is READ COMMITTED, so after waiting it reads what the previous holder committed; under REPEATABLE READ it would read
  the state from before the wait. Readers take no lock and are REPEATABLE READ, READ ONLY: one snapshot.
- A commit is on disk when it returns, even if the server's default differs.
- No setting outlives its transaction and nothing is prepared on the server, so a connection pooler can be used.
- The driver is psycopg 3; credentials come from the URL, PGPASSFILE, a service file or PGPASSWORD, and are never
  printed.

A ledger of another schema is refused, and left as it is.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from wherry.config.settings import ledger_url
from wherry.core.forks import was_open_at_fork, without_forks
from wherry.core.limits import scale_limit
from wherry.cures import Blank, Command, Cure
from wherry.errors import HostileError, StorageError, UnsupportedError, UsageError, missing_extra
from wherry.ledger import schema as tables
from wherry.store.home import ensure_home, irregular_sqlite_file, sqlite_file, without_secrets
from wherry.store.probe import ANSWER_SECONDS, SILENT, kind_of_silence
from wherry.store.waits import answer_policy, call_with_retries

_T = TypeVar("_T")
SQLITE, POSTGRESQL = "sqlite", "postgresql"
READ, WRITE = "read", "write"
BUSY_SECONDS = 60
_PAGE = 1000  # rows that a stream fetches at a time
_MANY = re.compile(r"IN \(:\*(\w+)\)")
_PARAMETER = re.compile(r":(\w+)")
_PAUSE_SECONDS = 0.05  # the longest wait before another attempt
_FORBIDDEN = "42501"  # SQLSTATE of a missing permission
_FORM_POLICY = "wherry_form"  # of infra/postgres/roles.sql: of wherry's statements, it refuses only times
# Functions of a schema must not be harmful, and a replaced row is a deleted one for triggers.
_PRAGMAS = ("synchronous=FULL", "foreign_keys=ON", "trusted_schema=OFF", "recursive_triggers=ON")
_LONGEST_VALUE = 32 << 20  # bytes of a value of SQLite: a verification that 200,000 tensors failed
_VERSION_AND_OBJECTS = (
    "SELECT user_version, type, name, tbl_name FROM pragma_user_version LEFT JOIN sqlite_master ON true"
)
_GENERATED = (  # hidden: 2 and 3
    "SELECT own.name FROM sqlite_master AS own JOIN pragma_table_xinfo(own.name) AS one "
    "WHERE own.type = 'table' AND one.hidden > 1 LIMIT 1"
)
_FOREIGN_CURE = "do not use this file; open a copy of known origin, or start another ledger"
_SCHEMA_CURE = Cure(
    "use the wherry that wrote it; or move it away, or name a new ledger in WHERRY_LEDGER, "
    "and fill the new one with {}",
    Command("ledger rebuild", Blank("ROOT")),
)
_FORK_CURE = "start the process with multiprocessing's spawn instead of fork, or use a ledger in PostgreSQL"
_SQLITE = ("sqlite", "sqlite+pysqlite")
_CURE = "set WHERRY_LEDGER to sqlite:////absolute/path.db or postgresql://host:5432/database"
_LOCK = 0x7768657272790001  # `wherry` in ASCII, and the number of the lock
_NOTE = "wherry ledger, schema "
# This query of the catalog sees what was committed during the wait for the lock; to_regclass() may not, as it answers
# from a cache of the session.
_VERSION = (
    "SELECT d.description FROM pg_catalog.pg_class c "  # noqa: S608  our own name
    "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "JOIN pg_catalog.pg_description d ON d.objoid = c.oid AND d.objsubid = 0 "
    "AND d.classoid = 'pg_catalog.pg_class'::regclass "
    f"WHERE n.nspname = '{tables.SCHEMA_NAME}' AND c.relname = 'statement'"
)
# SQLSTATE classes and codes after which a retry may succeed: connection lost, deadlock or serialization failure, too
# many connections or out of resources, shutting down or starting up; 55P03 is a lock timeout.
_RETRYABLE = ("08", "40", "53", "57P", "55P03")
_AWAY = ("08", "57P")  # of these, the server is not there, starts or stops
# The same for a refused connection, whose error has the server's words and no SQLSTATE.
_BUSY_WORDS = ("starting up", "shutting down", "recovery", "too many", "remaining connection slots")
# In one message; tables are those of the ledger, whatever else the database has.
_PATH = f"SET LOCAL search_path = {tables.SCHEMA_NAME}, pg_temp"
_BEGIN_READ = f"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; {_PATH}"
_BEGIN_WRITE = (
    f"SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; {_PATH}; "
    f"SELECT set_config('lock_timeout', '{BUSY_SECONDS}s', true), CASE WHEN "
    "current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END"
)
_HAS_SCHEMA = f"SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = '{tables.SCHEMA_NAME}'"  # noqa: S608  our own name
_TRANSACTIONS = 3  # that are begun before one whose connection is lost is an error
_answered: set[str] = set()  # URIs of databases whose servers have answered
# URI of a database whose server did not answer → when that was found out, and the error.
_silent: dict[str, tuple[float, StorageError]] = {}


class LedgerConnection:
    """A transaction that has begun; used by one thread.

    Attributes:
        dialect: SQLITE or POSTGRESQL.
        uri: the ledger, without secrets; of SQLite the path of its file.
    """

    def __init__(self, driver: Any, dialect: str, uri: str) -> None:
        self.dialect, self.uri, self._driver = dialect, uri, driver

    def rows(self, query: str, /, **values: Any) -> Generator[tuple[Any, ...]]:
        """The rows of a query, one after another; a list among the values is that of an `IN (:*name)`."""
        cursor = self.execute(query, values)  # goes with these rows
        if self.dialect != SQLITE:
            yield from cursor
            return
        names = [column[0] for column in cursor.description]
        kinds = [(at, tables.TYPES[name]) for at, name in enumerate(names) if name in tables.TYPES]
        flags = [at for at, name in enumerate(names) if name in tables.FLAGS]
        for row in cursor:
            for at, kind in kinds:
                if type(row[at]) is not kind and row[at] is not None:
                    found = type(row[at]).__name__
                    raise tables.damage_error(f"values: {found} in a column of {kind.__name__}")
            yield (
                row
                if not flags
                else tuple([value == 1 if at in flags else value for at, value in enumerate(row)])
            )

    def stream(self, query: str) -> Generator[tuple[Any, ...]]:
        """The rows of a long query as they are read: the driver of PostgreSQL would fetch all of them at once."""
        if self.dialect == SQLITE:
            yield from self.rows(query)
            return
        with self._driver.cursor(name="wherry_rows") as cursor:
            cursor.itersize = _PAGE
            yield from cursor.execute(query)

    def first(self, query: str, /, **values: Any) -> tuple[Any, ...] | None:
        """The first row of a query; None if there is none."""
        with closing(self.rows(query, **values)) as found:
            return next(found, None)

    def value(self, query: str, /, **values: Any) -> Any:
        """The first column of the first row of a query; None if there is none."""
        row = self.first(query, **values)
        return None if row is None else row[0]

    def change(self, statement: str, *rows: Mapping[str, Any]) -> int:
        """Execute a statement that returns no rows, for each row of parameters, or once without.

        Returns:
            How many rows of the last execution it has changed.
        """
        changed = 0
        for values in rows or ({},):
            with closing(self.execute(statement, values)) as cursor:
                changed = cursor.rowcount
        return changed

    def execute(self, query: str, values: Mapping[str, Any]) -> Any:
        """The driver's cursor of a query."""
        if self.dialect == SQLITE:
            fitting = {
                name: json.dumps(value) if type(value) is list else value for name, value in values.items()
            }
            return self._driver.execute(_for_sqlite(query), fitting)
        return self._driver.execute(_for_postgres(query), values) if values else self._driver.execute(query)


@lru_cache(256)
def _for_sqlite(query: str) -> str:
    return _MANY.sub(r"IN (SELECT value FROM json_each(:\1))", query)


@lru_cache(256)
def _for_postgres(query: str) -> str:
    return _PARAMETER.sub(r"%(\1)s", _MANY.sub(r"= ANY(:\1)", query))


class Backend(Protocol):
    """What differs between databases.

    Attributes:
        dialect: SQLITE or POSTGRESQL.
        errors: the errors of the driver.
    """

    dialect: str
    errors: tuple[type[Exception], ...]

    def connect(self) -> Any:
        """A new connection of the driver."""

    def begin(self, driver: Any, kind: str) -> None:
        """Begin a transaction, for `READ` or `WRITE`; the latter returns with the lock held."""

    def version(self, connection: LedgerConnection) -> int:
        """The schema version of the database; 0 if it has none yet."""
        ...

    def create(self, connection: LedgerConnection) -> None:
        """Create missing tables, indexes and triggers, and store the schema version."""

    def busy(self, error: Exception) -> bool:
        """Whether the same operation can succeed a moment later."""
        ...

    def is_lost(self, error: BaseException | None) -> bool:  # noqa: ARG002  a file has no server
        """Whether an error is that the server has ended the connection, or is away."""
        return False

    def silence(self, error: Exception) -> str | None:  # noqa: ARG002
        """Why the server did not answer, in a few words; None if it answered, or if the database has no server."""
        return None

    def away(self, error: Exception) -> str | None:  # noqa: ARG002
        """Why no transaction can begin, if the server is not answering, starting or stopping; None for other errors."""
        return None


class Sqlite(Backend):
    """SQLite; the schema version is stored as `user_version`."""

    dialect = SQLITE
    errors = (sqlite3.Error,)

    def __init__(self, file: Path) -> None:
        self._file = file

    def connect(self) -> sqlite3.Connection:
        """See Backend; transactions begin only as `begin` says."""
        driver = sqlite3.connect(
            self._file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            prepare_sqlite(driver)
        except BaseException:
            driver.close()
            raise
        return driver

    def begin(self, driver: sqlite3.Connection, kind: str) -> None:
        """Take the write lock at the start of a write transaction: upgrading a read transaction later can fail."""
        driver.execute("BEGIN IMMEDIATE" if kind == WRITE else "BEGIN")

    def version(self, connection: LedgerConnection) -> int:
        """See Backend; a file with an object that wherry does not create is refused."""
        rows = list(connection.rows(_VERSION_AND_OBJECTS))
        if rows[0][0] not in (0, tables.SCHEMA):
            return rows[0][0]  # of another wherry, which may have created other objects
        for _version, kind, name, table in rows:
            if kind is not None and not _is_ours(kind, name, table):
                raise HostileError(
                    f"the ledger has a {kind} that wherry does not create: {name!r:.100}",
                    uri=connection.uri,
                    cure=_FOREIGN_CURE,
                )
        computed = connection.value(_GENERATED)
        if computed:
            raise HostileError(
                f"the ledger has a generated column that wherry does not create, in {computed!r:.100}",
                uri=connection.uri,
                cure=_FOREIGN_CURE,
            )
        return rows[0][0]

    def create(self, connection: LedgerConnection) -> None:
        """See Backend."""
        for table in tables.TABLES:
            for text in table.creation(SQLITE):
                connection.change(text)
        for trigger in tables.sqlite_triggers():
            connection.change(trigger)
        connection.change(f"PRAGMA user_version = {tables.SCHEMA}")

    def busy(self, error: Exception) -> bool:
        """See Backend."""
        return _is_busy(error)


def _is_ours(kind: str, name: str, table: str) -> bool:
    """Whether wherry, or SQLite for one of its tables, may have created an object; `ledger check` compares texts."""
    if kind == "table":
        return name in tables.NAMES or name.startswith("sqlite_")
    if kind == "trigger":
        return name in tables.stored_triggers()
    return kind == "index" and table in tables.NAMES


def _is_busy(error: object) -> bool:
    """Whether SQLite gave up because of others: SQLITE_BUSY, _LOCKED or _PROTOCOL, which is a race of openers."""
    return any(words in str(error) for words in ("locked", "locking protocol"))


def prepare_sqlite(driver: sqlite3.Connection) -> None:
    """Make every commit of a new connection durable; WAL does not block readers."""
    driver.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, scale_limit(_LONGEST_VALUE))
    for pragma in (f"busy_timeout={BUSY_SECONDS * 1000}", *_PRAGMAS):
        driver.execute(f"PRAGMA {pragma}").close()
    _begin_wal(driver)


def _begin_wal(connection: sqlite3.Connection) -> None:
    """Change a database to WAL mode, which it keeps. SQLite does not wait for others that do the same at once."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0, _PAUSE_SECONDS))  # noqa: S311  not a secret: it separates two openers
        else:
            return


class Postgres(Backend):
    """PostgreSQL; the schema version is stored in the comment on the table of statements."""

    dialect = POSTGRESQL

    def __init__(self, driver: Any, options: Mapping[str, Any]) -> None:
        """Choose the database.

        Args:
            driver: the module psycopg.
            options: of its connections.
        """
        self.errors = (driver.Error,)
        self._driver, self._options = driver, options

    def connect(self) -> Any:
        """See Backend; nothing is prepared on the server: a pooler may hand each transaction to another session."""
        return self._driver.connect(**self._options, prepare_threshold=None)

    def begin(self, driver: Any, kind: str) -> None:
        """See Backend."""
        driver.execute(_BEGIN_WRITE if kind == WRITE else _BEGIN_READ)
        if kind == WRITE:
            driver.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")

    def version(self, connection: LedgerConnection) -> int:
        """See Backend."""
        note = str(connection.value(_VERSION) or "")
        return int(note.removeprefix(_NOTE)) if note.startswith(_NOTE) else 0

    def create(self, connection: LedgerConnection) -> None:
        """See Backend."""
        if connection.value(_HAS_SCHEMA) is None:
            connection.change(f"CREATE SCHEMA {tables.SCHEMA_NAME}")
        for table in tables.TABLES:
            for text in table.creation(POSTGRESQL):
                connection.change(text)
        for trigger in tables.postgres_triggers():
            connection.change(trigger)
        connection.change(f"COMMENT ON TABLE {tables.SCHEMA_NAME}.statement IS '{_NOTE}{tables.SCHEMA}'")

    def busy(self, error: Exception) -> bool:
        """See Backend."""
        state, text = getattr(error, "sqlstate", None), str(error)
        if state is None and "FATAL:" in text:
            return any(words in text for words in _BUSY_WORDS)
        return state is None or state.startswith(_RETRYABLE)

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


class Ledger:
    """An opened ledger; get one from `open_ledger`."""

    def __init__(self, uri: str, backend: Backend) -> None:
        self.uri, self.backend = uri, backend
        # One is kept open between transactions: the last connection to a file of SQLite that closes moves its log into
        # it, which costs four syncs.
        self._idle: list[Any] = []
        self._lock, self._closed = threading.Lock(), False

    def close(self) -> None:
        """Close its connections; one that another thread uses is closed when that transaction ends."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for driver in idle:
            _close(driver)

    @contextmanager
    def write(self) -> Generator[LedgerConnection]:
        """A transaction that holds the write lock from its start."""
        with self._transaction(WRITE) as connection:
            yield connection

    @contextmanager
    def read(self) -> Generator[LedgerConnection]:
        """A transaction that sees a consistent snapshot of the ledger."""
        with self._transaction(READ) as connection:
            yield connection

    def change(self, do: Callable[[LedgerConnection], _T]) -> _T:
        """What a function returns in a transaction that holds the write lock; made again if its connection is lost.

        A commit whose answer is lost may have been made: the function finds what it has written itself, and then
        writes nothing.

        Raises:
            StorageError: the connection was lost each time, or as for `write`.
        """
        for left in reversed(range(_TRANSACTIONS)):
            begun = False
            try:
                with self.write() as connection:
                    begun = True
                    return do(connection)
            except StorageError as error:
                if not (begun and left and self.backend.is_lost(error.__cause__)):
                    raise
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _transaction(self, kind: str) -> Generator[LedgerConnection]:
        with _storage_errors(self.uri, self.backend), without_forks():
            driver = self._begin(kind)
            try:
                yield LedgerConnection(driver, self.backend.dialect, self.uri)
                driver.commit()
            except BaseException:
                with suppress(*self.backend.errors):
                    driver.rollback()
                raise
            finally:
                self._give(driver)

    def _begin(self, kind: str) -> Any:
        """A connection with a transaction; a server that does not answer, or starts, is tried again as a store is.

        Raises:
            StorageError: it was tried for twice the `storage_timeout`.
        """

        def attempt(_seconds: float) -> Any:
            try:
                return self._begun(kind)
            except self.backend.errors as error:
                away = self.backend.away(error)
                if away is None:
                    raise
                raise _unanswered_error(self.uri, away) from error

        try:
            begun = call_with_retries(attempt, self.uri, answer_policy(), known=self.uri in _answered)
        except StorageError as error:
            _silent[self.uri] = time.monotonic(), error
            raise
        _answered.add(self.uri)
        return begun

    def _begun(self, kind: str) -> Any:
        """A connection in which a transaction has begun; one that was idle may have been ended by its server."""
        with self._lock:
            driver = self._idle.pop() if self._idle else None
        if driver is not None:
            try:
                self.backend.begin(driver, kind)
            except BaseException as error:
                _close(driver)
                if not self.backend.is_lost(error):
                    raise
            else:
                return driver
        driver = self.backend.connect()
        try:
            self.backend.begin(driver, kind)
        except BaseException:
            _close(driver)
            raise
        return driver

    def _give(self, driver: Any) -> None:
        """Keep a connection for the next transaction, unless there is one already, or this one cannot be used again.

        It cannot if its server has ended it (psycopg), or if its transaction could not be rolled back (sqlite3).
        """
        useless = getattr(driver, "closed", False) or getattr(driver, "in_transaction", False)
        with self._lock:
            kept = not (self._closed or self._idle or useless)
            if kept:
                self._idle.append(driver)
        if not kept:
            _close(driver)


def _close(driver: Any) -> None:
    with suppress(Exception):  # what was committed is durable
        driver.close()


@contextmanager
def open_ledger(url: str | None = None) -> Generator[Ledger]:
    """Open the ledger, and create it if it does not exist.

    Args:
        url: sqlite:////absolute/path.db or postgresql://host:5432/database; `WHERRY_LEDGER` or the file in the home by
            default.

    Raises:
        StorageError: it cannot be read or written.
        UsageError: the URL is invalid, or names an unknown driver or option.
        UnsupportedError: the database is neither SQLite nor PostgreSQL, or the ledger has another schema.
        HostileError: the file holds something that wherry does not create.
        MissingExtraError: the driver of the database is not installed.
    """
    chosen = url or ledger_url()
    file = sqlite_file(chosen)
    if url is None and file is not None:
        ensure_home()
    opened = "" if file is None else os.path.realpath(file)
    if was_open_at_fork(opened):
        raise StorageError(
            "the ledger was open when this process was forked: SQLite cannot use it in both",
            uri=opened,
            cure=_FORK_CURE,
        )
    uri, backend = _backend(chosen)
    with (
        without_forks(opened) if file is not None else nullcontext(),
        closing(Ledger(uri, backend)) as ledger,
    ):
        _prepare(ledger)
        yield ledger


def _backend(url: str) -> tuple[str, Backend]:
    """The ledger's URI without secrets, and its database.

    Raises:
        StorageError, UsageError, UnsupportedError, MissingExtraError: as for `open_ledger`.
    """
    file, scheme = sqlite_file(url), url.partition("://")[0]
    if file is not None:
        if scheme not in _SQLITE:
            raise UsageError(f"unsupported ledger driver {scheme}", uri=without_secrets(url), cure=_CURE)
        if "?" in url:
            raise UsageError(
                "invalid ledger URL: a file of SQLite has no options", uri=without_secrets(url), cure=_CURE
            )
        if (part := irregular_sqlite_file(file)) is not None:
            raise StorageError("the ledger cannot be used: not a regular file", uri=str(part), cure=_CURE)
        return str(file), Sqlite(file)
    if scheme.partition("+")[0] in ("postgresql", "postgres"):
        try:
            return without_secrets(url), postgres_of(url)
        except UsageError:
            raise
        except ValueError:  # whose text can have the password
            raise UsageError(
                "invalid ledger URL: it cannot be parsed", uri=without_secrets(url), cure=_CURE
            ) from None
    raise UnsupportedError(
        "unsupported ledger database; expected SQLite or PostgreSQL", uri=without_secrets(url), cure=_CURE
    )


def _prepare(ledger: Ledger) -> None:
    """Create the tables and triggers of an empty ledger; the check costs one query."""
    with ledger.read() as connection:
        version = ledger.backend.version(connection)
    if version == 0:
        with ledger.write() as connection:
            version = ledger.backend.version(connection)  # another process may have created it meanwhile
            if version == 0:
                ledger.backend.create(connection)
                return
    if version != tables.SCHEMA:
        raise UnsupportedError(
            f"the ledger has schema {version}, but this wherry requires {tables.SCHEMA}",
            uri=ledger.uri,
            cure=_SCHEMA_CURE,
        )


@contextmanager
def _storage_errors(uri: str, backend: Backend) -> Generator[None]:
    # Fail at once if the server was silent a moment ago: the end of a failed command must not wait for it again.
    since, silent = _silent.get(uri, (-math.inf, None))
    if silent is not None and time.monotonic() - since < ANSWER_SECONDS:
        raise StorageError(silent.what, uri=uri, cure=silent.cure, retryable=True)
    try:
        yield
    except backend.errors as error:
        reason, text = backend.silence(error), " ".join(str(error).split())
        if reason is not None:
            raise _unanswered_error(uri, reason) from error
        if getattr(error, "sqlstate", None) == _FORBIDDEN:
            late = "set the clock of this machine, which is over a day from that of the server"
            role = "use a login with the role that this step needs, worker, registrar or auditor, in WHERRY_LEDGER"
            raise StorageError(
                f"the login of the ledger lacks a permission: {text}",
                uri=uri,
                cure=late if _FORM_POLICY in text else role,
            ) from error
        busy = backend.busy(error)
        raise StorageError(
            f"the ledger cannot be used: {text}",
            uri=uri,
            cure="try again"
            if busy
            else "check that the ledger can be reached and written, or set WHERRY_LEDGER",
            retryable=busy,
        ) from error


def _unanswered_error(uri: str, reason: str) -> StorageError:
    error = StorageError(
        f"the ledger cannot be used: PostgreSQL does not answer: {reason}",
        uri=uri,
        cure="start the database server, or check WHERRY_LEDGER",
        retryable=True,
    )
    error.kind = kind_of_silence(reason)
    return error
