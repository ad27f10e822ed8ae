"""The ledger's database: opening, creation, locking and durability. `wherry.ledger.record` writes it.

SQLite, the default, is one file in WAL mode with `synchronous=FULL`: a commit is on disk when it returns, readers
are not blocked, and writers of all processes wait for one another. PostgreSQL is for teams; `wherry.ledger.postgres`
implements the differences. Both give the same guarantees:

- `write()` holds the single lock of the ledger from its start, so appends happen strictly one after the other.
- `read()` sees a consistent snapshot of the ledger, whatever is appended meanwhile.

A ledger of another schema is refused, and left as it is.
"""

from __future__ import annotations

import math
import os
import random
import sqlite3
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import QueuePool

from wherry.config.settings import ledger_url
from wherry.core.forks import was_open_at_fork, without_forks
from wherry.errors import HostileError, StorageError, UnsupportedError, UsageError, WherryError
from wherry.ledger import schema as tables
from wherry.ledger.schema import BUSY_SECONDS, READ, WRITE
from wherry.remote.probe import ANSWER_SECONDS, kind_of_silence
from wherry.remote.retries import answer_policy, call_with_retries
from wherry.storage.home import ensure_home, irregular_sqlite_file, sqlite_file, without_secrets
from wherry.text.limits import scale_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_T = TypeVar("_T")
_PAUSE_SECONDS = 0.05  # the longest wait before another attempt
BEGIN = "wherry_begin"  # execution option that chooses the kind of transaction
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
_SCHEMA_CURE = (
    "use the wherry that wrote it; or move it away, or name a new ledger in WHERRY_LEDGER, and fill the new one with "
    "`wherry ledger rebuild ROOT`"
)
_FORK_CURE = "start the process with multiprocessing's spawn instead of fork, or use a ledger in PostgreSQL"
_SQLITE = ("sqlite", "sqlite+pysqlite")
_CURE = "set WHERRY_LEDGER to sqlite:////absolute/path.db or postgresql://host:5432/database"


class Backend(Protocol):
    """The operations that differ between databases.

    Attributes:
        prefix: what precedes the name of a table in SQL that SQLAlchemy does not write.
    """

    prefix: str

    def connected(self, connection: Any) -> None:
        """Prepare a new connection of the driver."""

    def begin(self, connection: Connection, kind: str) -> None:
        """Begin a transaction, for `READ` or `WRITE`; the latter returns with the lock held."""

    def version(self, connection: Connection) -> int:
        """The schema version of the database; 0 if it has none yet."""
        ...

    def create(self, connection: Connection) -> None:
        """Create missing tables, indexes and triggers, and store the schema version."""

    def busy(self, error: DBAPIError) -> bool:
        """Whether the same operation can succeed a moment later."""
        ...

    def silence(self, error: DBAPIError) -> str | None:
        """Why the server did not answer, in a few words; None if it did, or if there is none."""
        ...

    def away(self, error: DBAPIError) -> str | None:
        """Why no transaction begins, where the server does not answer, starts or stops; None for any other reason."""
        ...


class Ledger:
    """An opened ledger; get one from `open_ledger`."""

    def __init__(self, engine: Engine, uri: str, backend: Backend) -> None:
        self._engine = engine
        self.uri = uri
        self.backend = backend

    @contextmanager
    def write(self) -> Generator[Connection]:
        """A transaction that holds the write lock from its start."""
        with self._transaction(WRITE) as connection:
            yield connection

    @contextmanager
    def read(self) -> Generator[Connection]:
        """A transaction that sees a consistent snapshot of the ledger."""
        with self._transaction(READ) as connection:
            yield connection

    def change(self, do: Callable[[Connection], _T]) -> _T:
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
                if not (begun and left and self._is_lost(error.__cause__)):
                    raise
        raise AssertionError("the last try returns or raises")

    def _is_lost(self, error: BaseException | None) -> bool:
        """Whether an error of the database is that its server has ended the connection, or is away."""
        lost = isinstance(error, DBAPIError) and (error.connection_invalidated or self.backend.away(error))
        return bool(lost)

    @contextmanager
    def _transaction(self, kind: str) -> Generator[Connection]:
        engine = self._engine.execution_options(**{BEGIN: kind})
        with _storage_errors(self.uri, self.backend), without_forks(), ExitStack() as stack:
            yield self._begin(engine, stack)

    def _begin(self, engine: Engine, stack: ExitStack) -> Connection:
        """A transaction in a stack; a server that does not answer, or starts, is tried again as a store is.

        Raises:
            StorageError: it was tried for twice the `storage_timeout`.
        """

        def attempt(_seconds: float) -> Connection:
            try:
                return stack.enter_context(engine.begin())
            except DBAPIError as error:
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


@contextmanager
def open_ledger(url: str | None = None) -> Generator[Ledger]:
    """Open the ledger, and create it if it does not exist.

    Args:
        url: SQLAlchemy URL; `WHERRY_LEDGER` or the file in the home by default.

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
    engine, uri, backend = _engine(chosen)
    with without_forks(opened) if file is not None else nullcontext(), _used(engine):
        ledger = Ledger(engine, uri, backend)
        _prepare(ledger)
        yield ledger


def _engine(url: str) -> tuple[Engine, str, Backend]:
    try:
        return _connect(url)
    except WherryError:
        raise
    except (ArgumentError, ValueError, TypeError) as error:  # a port that is not a number, an unknown option
        raise UsageError(
            f"invalid ledger URL: {type(error).__name__}",
            uri=without_secrets(url),
            cure=_CURE,
        ) from error


def _connect(url: str) -> tuple[Engine, str, Backend]:
    file = sqlite_file(url)
    if file is not None:
        driver = make_url(url).drivername
        if driver not in _SQLITE:
            raise UsageError(f"unsupported ledger driver {driver}", uri=without_secrets(url), cure=_CURE)
        if (other := irregular_sqlite_file(file)) is not None:
            raise StorageError("the ledger cannot be used: not a regular file", uri=str(other), cure=_CURE)
        return _sqlite_engine(url, str(file), os.getpid()), str(file), Sqlite()
    if url.partition("://")[0].partition("+")[0] in ("postgresql", "postgres"):
        from wherry.ledger.postgres import connect

        engine, uri, backend = connect(url)
        _listen(engine, backend)
        return engine, uri, backend
    raise UnsupportedError(
        "unsupported ledger database; expected SQLite or PostgreSQL",
        uri=without_secrets(url),
        cure=_CURE,
    )


_users = Counter[Engine]()
_users_lock = threading.Lock()


@contextmanager
def _used(engine: Engine) -> Generator[None]:
    """Close all connections of an engine when the last of its users has ended.

    An engine that is disposed of while another thread uses a connection forgets that one: it stays open until the
    garbage is collected, and a process that is forked meanwhile inherits it.
    """
    with _users_lock:
        _users[engine] += 1
    try:
        yield
    finally:
        with _users_lock:
            _users[engine] -= 1
            if not _users[engine]:
                del _users[engine]
                engine.dispose()


@lru_cache(maxsize=4)
def _sqlite_engine(url: str, _file: str, _process: int) -> Engine:
    """The engine of a file, which has compiled the statements of earlier uses; closing a ledger closes its connections.

    A fork gets another one: connections of SQLite must not be used by the child of the process that opened them.
    """
    # Keep a connection open: closing the last one checkpoints the WAL, which costs four syncs for each statement.
    arguments: dict[str, Any] = {
        "connect_args": {"timeout": BUSY_SECONDS},
        "pool_size": 1,
        "max_overflow": -1,
    }
    engine = create_engine(url, poolclass=QueuePool, **arguments)
    _listen(engine, Sqlite())
    return engine


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


class Sqlite:
    """SQLite; the schema version is stored as `user_version`."""

    prefix = ""

    def connected(self, connection: Any) -> None:
        """Disable the driver's implicit transactions, and make every commit durable; WAL does not block readers."""
        connection.isolation_level = None
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, scale_limit(_LONGEST_VALUE))
        for pragma in (f"busy_timeout={BUSY_SECONDS * 1000}", *_PRAGMAS):
            connection.execute(f"PRAGMA {pragma}").close()
        _begin_wal(connection)

    def begin(self, connection: Connection, kind: str) -> None:
        """Take the write lock at the start of a write transaction: upgrading a read transaction later can fail."""
        connection.exec_driver_sql("BEGIN IMMEDIATE" if kind == WRITE else "BEGIN")

    def version(self, connection: Connection) -> int:
        """See Backend; a file with an object that wherry does not create is refused."""
        rows = connection.exec_driver_sql(_VERSION_AND_OBJECTS).all()
        if rows[0][0] not in (0, tables.SCHEMA):
            return rows[0][0]  # of another wherry, which may have created other objects
        for _version, kind, name, table in rows:
            if kind is not None and not _is_ours(kind, name, table):
                raise HostileError(
                    f"the ledger has a {kind} that wherry does not create: {name!r:.100}",
                    uri=str(connection.engine.url.database),
                    cure=_FOREIGN_CURE,
                )
        computed = connection.exec_driver_sql(_GENERATED).scalar()
        if computed:
            raise HostileError(
                f"the ledger has a generated column that wherry does not create, in {computed!r:.100}",
                uri=str(connection.engine.url.database),
                cure=_FOREIGN_CURE,
            )
        return rows[0][0]

    def create(self, connection: Connection) -> None:
        """See Backend."""
        tables.metadata.create_all(connection)
        for trigger in tables.sqlite_triggers():
            connection.exec_driver_sql(trigger)
        connection.exec_driver_sql(f"PRAGMA user_version = {tables.SCHEMA}")

    def busy(self, error: DBAPIError) -> bool:
        """See Backend."""
        return _is_busy(error.orig)

    def silence(self, error: DBAPIError) -> str | None:  # noqa: ARG002  a file has no server
        """See Backend."""
        return None

    away = silence


def _is_ours(kind: str, name: str, table: str) -> bool:
    """Whether wherry, or SQLite for one of its tables, may have created an object; `ledger check` compares texts."""
    if kind == "table":
        return name in tables.metadata.tables or name.startswith("sqlite_")
    if kind == "trigger":
        return name in tables.stored_triggers()
    return kind == "index" and table in tables.metadata.tables


def _is_busy(error: object) -> bool:
    """Whether SQLite gave up because of others: SQLITE_BUSY, _LOCKED or _PROTOCOL, which is a race of openers."""
    return any(words in str(error) for words in ("locked", "locking protocol"))


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


def _listen(engine: Engine, backend: Backend) -> None:
    def on_connect(connection: Any, _record: object) -> None:
        backend.connected(connection)

    def on_begin(connection: Connection) -> None:
        backend.begin(connection, connection.get_execution_options().get(BEGIN, READ))

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)


@contextmanager
def _storage_errors(uri: str, backend: Backend) -> Generator[None]:
    _require_answer(uri)
    try:
        yield
    except DBAPIError as error:
        reason = backend.silence(error)
        if reason is not None:
            raise _unanswered_error(uri, reason) from error
        if getattr(error.orig, "sqlstate", None) == _FORBIDDEN:
            raise _permission_error(uri, " ".join(str(error.orig).split())) from error
        busy = backend.busy(error)
        raise StorageError(
            f"the ledger cannot be used: {' '.join(str(error.orig).split())}",
            uri=uri,
            cure="try again"
            if busy
            else "check that the ledger can be reached and written, or set WHERRY_LEDGER",
            retryable=busy,
        ) from error


def _permission_error(uri: str, reason: str) -> StorageError:
    late = "set the clock of this machine, which is over a day from that of the server"
    role = "use a login with the role that this step needs, worker, registrar or auditor, in WHERRY_LEDGER"
    return StorageError(
        f"the login of the ledger lacks a permission: {reason}",
        uri=uri,
        cure=late if _FORM_POLICY in reason else role,
    )


_TRANSACTIONS = 3  # that are begun before one whose connection is lost is an error
_answered: set[str] = set()  # URIs of databases whose servers have answered
# URI of a database whose server did not answer → when that was found out, and the error.
_silent: dict[str, tuple[float, StorageError]] = {}


def _require_answer(uri: str) -> None:
    """Fail at once if the server was silent a moment ago: the end of a failed command must not wait for it again."""
    since, error = _silent.get(uri, (-math.inf, None))
    if error is not None and time.monotonic() - since < ANSWER_SECONDS:
        raise StorageError(error.what, uri=uri, cure=error.cure, retryable=True)


def _unanswered_error(uri: str, reason: str) -> StorageError:
    error = StorageError(
        f"the ledger cannot be used: PostgreSQL does not answer: {reason}",
        uri=uri,
        cure="start the database server, or check WHERRY_LEDGER",
        retryable=True,
    )
    error.kind = kind_of_silence(reason)
    return error
