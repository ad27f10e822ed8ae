"""The tables of the ledger, and the triggers that protect its statements from changes.

`statement` is the ledger: append-only, each row chained to the one before it, with the schema version of its body. The
rows of every other table but one follow from the statements (`wherry.ledger.append`), and could be derived again;
`wherry ledger check` compares the two, so that it finds an altered, missing or forged row in any of them. Only
`projection` has its own state: the cursor of each projection. Its rows are sealed with a digest.

Triggers abort every UPDATE and DELETE of `statement` and `edge`, and every statement that does not continue the
chain. If somebody removes the triggers and alters a row, the hash chain breaks, and the check finds it.

Columns that hold digests and URIs are compared byte by byte (collation C on PostgreSQL, where the database's own
collation would be slower and could not serve prefixes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from wherry.errors import CorruptError
from wherry.storage.home import LEDGER_SCHEMA

if TYPE_CHECKING:
    from sqlalchemy import Dialect

SCHEMA = LEDGER_SCHEMA
GENESIS = "0" * 64  # the previous hash of the first statement


def damage_error(what: str) -> CorruptError:
    """The error for contents that wherry never stores in a ledger."""
    return CorruptError(
        f"the ledger holds invalid {what}",
        cure="list the altered statements with `wherry ledger check`, then restore the ledger from a backup",
    )


class _TypedValues:
    """A column whose values are checked as they are read from SQLite, which stores any type in any column."""

    stored: type

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:  # noqa: ARG002  SQLAlchemy passes it
        """A function that refuses values of another type; none on databases that enforce types."""
        kind = self.stored

        def check_value(value: Any) -> Any:
            if value is not None and type(value) is not kind:
                raise damage_error(f"values: {type(value).__name__} in a column of {kind.__name__}")
            return value

        return check_value if dialect.name == "sqlite" else None


class _ShortText(_TypedValues, String):
    stored = str


class _LongText(_TypedValues, Text):
    stored = str


class _SmallInteger(_TypedValues, Integer):
    stored = int


class _LargeInteger(_TypedValues, BigInteger):
    stored = int


# SHA-256 digits: of statements, plans and seals. A checkpoint's digest has its algorithm, too.
_HASH = _ShortText(64).with_variant(String(64, collation="C"), "postgresql")
_DIGEST = _ShortText(71).with_variant(String(71, collation="C"), "postgresql")
_TEXT = _ShortText().with_variant(Text(collation="C"), "postgresql")
_SEQ = _SmallInteger().with_variant(BigInteger(), "postgresql")  # INTEGER makes it SQLite's rowid

metadata = MetaData()

checkpoint = Table(
    "checkpoint",
    metadata,
    Column("checkpoint_digest", _DIGEST, primary_key=True),
    Column("weights_digest", _DIGEST, nullable=False, index=True),
    Column("format", _TEXT, nullable=False),
    Column("format_version", _TEXT),
    Column("kind", _TEXT, nullable=False),
    Column("step", _LargeInteger()),
    Column("tensors", _LargeInteger(), nullable=False),
    Column("parameters", _LargeInteger(), nullable=False),
    Column("nbytes", _LargeInteger(), nullable=False),
)

statement = Table(
    "statement",
    metadata,
    Column("seq", _SEQ, primary_key=True, autoincrement=False),
    Column("prev", _HASH, nullable=False),
    Column("hash", _HASH, nullable=False, unique=True),
    Column("kind", _TEXT, nullable=False),
    Column("schema", _SmallInteger(), nullable=False),
    Column("content", _HASH, nullable=False, index=True),
    Column("body", _LongText(), nullable=False),
    Column("time", _TEXT, nullable=False),  # by the clock of the machine that wrote it
    Column("storage_time", _TEXT, nullable=False),  # by the clock of the ledger's storage
)
Index("statement_prev", statement.c.prev, unique=True)  # two statements cannot continue the same one
Index("statement_kind", statement.c.kind, statement.c.seq)

location = Table(
    "location",
    metadata,
    Column("checkpoint_digest", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False),
    Column("uri", _TEXT, nullable=False),
    Column("fingerprint", _TEXT, nullable=False),
    Column("seen", _TEXT, nullable=False),
    Column("statement", _SEQ, ForeignKey(statement.c.seq), nullable=False),
    PrimaryKeyConstraint("checkpoint_digest", "uri"),
)
Index("location_uri", location.c.uri, location.c.statement)

tombstone = Table(  # also for unknown checkpoints, so without a foreign key to `checkpoint`
    "tombstone",
    metadata,
    Column("checkpoint_digest", _DIGEST, nullable=False),
    Column("uri", _TEXT, nullable=False),
    Column("time", _TEXT, nullable=False),
    Column("statement", _SEQ, ForeignKey(statement.c.seq), nullable=False),
    PrimaryKeyConstraint("checkpoint_digest", "uri"),
)

conversion = Table(
    "conversion",
    metadata,
    Column("statement", _SEQ, ForeignKey(statement.c.seq), primary_key=True, autoincrement=False),
    Column("source", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False, index=True),
    Column("source_uri", _TEXT, nullable=False),
    Column("source_fingerprint", _TEXT, nullable=False),
    Column("target", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False, index=True),
    Column("target_uri", _TEXT, nullable=False, index=True),
    Column("format", _TEXT, nullable=False),
    Column("plan_digest", _HASH, nullable=False),
    Column("options", _LongText(), nullable=False),
    Column("software", _TEXT, nullable=False),
    Column("lossless", Boolean, nullable=False),
    Column("time", _TEXT, nullable=False),
)
Index("conversion_source", conversion.c.source_fingerprint, conversion.c.source_uri)

edge = Table(
    "edge",
    metadata,
    Column("source", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False),
    Column("target", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False, index=True),
    Column("plan_digest", _HASH, nullable=False),
    Column("statement", _SEQ, ForeignKey(statement.c.seq), nullable=False),
    UniqueConstraint("source", "target", "plan_digest"),
)
Index("edge_statement", edge.c.statement)

verification = Table(
    "verification",
    metadata,
    Column("checkpoint_digest", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False),
    Column("level", _TEXT, nullable=False),
    Column("verdict", _TEXT, nullable=False),
    Column("time", _TEXT, nullable=False),
    Column("statement", _SEQ, ForeignKey(statement.c.seq), nullable=False),
    PrimaryKeyConstraint("checkpoint_digest", "level"),
)

registration = Table(
    "registration",
    metadata,
    Column("checkpoint_digest", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False),
    Column("registry", _TEXT, nullable=False),
    Column("name", _TEXT, nullable=False),
    Column("state", _TEXT, nullable=False),
    Column("version", _TEXT),
    Column("seen", _TEXT, nullable=False),
    Column("statement", _SEQ, ForeignKey(statement.c.seq), nullable=False),
    PrimaryKeyConstraint("checkpoint_digest", "registry", "name"),
)
Index("registration_name", registration.c.registry, registration.c.name)

projection = Table(
    "projection",
    metadata,
    Column("name", _TEXT, primary_key=True),
    Column("delivered", _SEQ, nullable=False),
    Column("failed", _LongText()),
    Column("tried", _TEXT, nullable=False),
    Column("seal", _HASH, nullable=False),
)

# Table → its key columns. A later statement about a row overwrites it, except in the tables of FIRST.
KEYS: dict[Table, tuple[str, ...]] = {
    checkpoint: ("checkpoint_digest",),
    location: ("checkpoint_digest", "uri"),
    tombstone: ("checkpoint_digest", "uri"),
    conversion: ("statement",),
    edge: ("source", "target", "plan_digest"),
    verification: ("checkpoint_digest", "level"),
    registration: ("checkpoint_digest", "registry", "name"),
}
FIRST = frozenset({checkpoint, conversion, edge})

_SEALED = ("statement", "edge")
_SAID = "the ledger is append-only: "
_BROKEN = f"{_SAID}this does not continue its chain"


def stored_triggers() -> dict[str, str]:
    """Name → text of the triggers, as SQLite stores them."""
    texts = [trigger.replace("IF NOT EXISTS ", "") for trigger in sqlite_triggers()]
    return {text.split()[2]: text for text in texts}


def stored_postgres_triggers(schema: str) -> dict[str, str]:
    """Name → table, type and text of the function of the triggers, as PostgreSQL stores them."""
    bodies = _bodies(schema)
    return {
        name: f"{table} {sum(_TYPES.get(word, 0) for word in f'BEFORE {verbs} {each}'.split())} {bodies[function]}"
        for name, table, verbs, each, function in _TRIGGERS
    }


def sqlite_triggers() -> tuple[str, ...]:
    """The triggers that protect the rows of the append-only tables."""
    sealed = [
        f"CREATE TRIGGER IF NOT EXISTS {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, '{_SAID}{table}'); END"
        for table in _SEALED
        for verb in ("UPDATE", "DELETE")
    ]
    continues = (
        f"CREATE TRIGGER IF NOT EXISTS statement_continues BEFORE INSERT ON statement WHEN {_breaks('statement')} "
        f"BEGIN SELECT RAISE(ABORT, '{_BROKEN}'); END"
    )
    return (*sealed, continues)


def postgres_triggers(schema: str) -> tuple[str, ...]:
    """The same for PostgreSQL, TRUNCATE included.

    Args:
        schema: the schema of the tables.
    """
    head = f"() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS"
    return (
        *(
            f"CREATE OR REPLACE FUNCTION {schema}.{name}{head} $$ {body} $$"
            for name, body in _bodies(schema).items()
        ),
        *(
            f"CREATE OR REPLACE TRIGGER {name} BEFORE {verbs} ON {schema}.{table} "
            f"FOR EACH {each} EXECUTE FUNCTION {schema}.{function}()"
            for name, table, verbs, each, function in _TRIGGERS
        ),
    )


_REFUSE, _REQUIRE = "refuse_change", "require_continuation"
_TYPES = {
    "ROW": 1,
    "BEFORE": 2,
    "INSERT": 4,
    "DELETE": 8,
    "UPDATE": 16,
    "TRUNCATE": 32,
}  # bits of pg_trigger.tgtype
_TRIGGERS = (  # name, table, statements, level, function
    *((f"{table}_no_change", table, "UPDATE OR DELETE", "ROW", _REFUSE) for table in _SEALED),
    *((f"{table}_no_truncate", table, "TRUNCATE", "STATEMENT", _REFUSE) for table in _SEALED),
    ("statement_continues", "statement", "INSERT", "ROW", _REQUIRE),
)


def _bodies(schema: str) -> dict[str, str]:
    """Name → text of the functions of the triggers."""
    broken = _breaks(f"{schema}.statement")
    return {
        _REFUSE: f"BEGIN RAISE EXCEPTION '{_SAID}%', TG_TABLE_NAME; END",
        _REQUIRE: f"BEGIN IF {broken} THEN RAISE EXCEPTION '{_BROKEN}'; END IF; RETURN NEW; END",
    }


def _breaks(table: str) -> str:
    """The condition under which a new statement does not continue the chain."""
    last = f"SELECT hash FROM {table} ORDER BY seq DESC LIMIT 1"  # noqa: S608  our own name
    count = f"SELECT max(seq) FROM {table}"  # noqa: S608  our own name
    return f"NEW.seq <> coalesce(({count}), 0) + 1 OR NEW.prev <> coalesce(({last}), '{GENESIS}')"


BUSY_SECONDS = 60


READ, WRITE = "read", "write"
