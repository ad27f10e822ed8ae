"""The tables of the ledger, and the triggers that protect its statements from changes.

`statement` is the ledger: append-only, each row chained to the one before it, with the schema version of its body. The
rows of every other table but one follow from the statements (`wherry.ledger.statements`), and could be derived again;
`wherry ledger check` compares the two, so that it finds an altered, missing or forged row in any of them. Only
`projection` has its own state: the cursor of each projection. Its rows are sealed with a digest.

Triggers abort every UPDATE and DELETE of `statement` and `edge`, and every statement that does not continue the
chain. If somebody removes the triggers and alters a row, the hash chain breaks, and the check finds it.

Columns that hold digests and URIs are compared byte by byte (collation C on PostgreSQL, where the database's own
collation would be slower and could not serve prefixes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Command, Cure
from wherry.errors import CorruptError
from wherry.store.home import LEDGER_SCHEMA

SCHEMA = LEDGER_SCHEMA
SCHEMA_NAME = "wherry"  # of PostgreSQL, in which the tables are
GENESIS = "0" * 64  # the previous hash of the first statement


def damage_error(what: str) -> CorruptError:
    """The error for contents that wherry never stores in a ledger."""
    return CorruptError(
        f"the ledger holds invalid {what}",
        cure=Cure(
            "list the altered statements with {}, then restore the ledger from a backup",
            Command("ledger check"),
        ),
    )


# The words of a column's type; a hash is that of a statement, plan or seal, a digest has its algorithm, too.
_TYPES_OF = {
    "sqlite": {
        "hash": "VARCHAR(64)",
        "digest": "VARCHAR(71)",
        "text": "VARCHAR",
        "long": "TEXT",
        "number": "INTEGER",  # makes a primary key SQLite's rowid
        "large": "BIGINT",
        "small": "INTEGER",
        "flag": "BOOLEAN",
    },
    "postgresql": {
        "hash": 'VARCHAR(64) COLLATE "C"',
        "digest": 'VARCHAR(71) COLLATE "C"',
        "text": 'TEXT COLLATE "C"',
        "long": "TEXT",
        "number": "BIGINT",
        "large": "BIGINT",
        "small": "INTEGER",
        "flag": "BOOLEAN",
    },
}
# The words that may follow it.
_RULES = {
    "": "NOT NULL",
    "null": "",
    "unique": "NOT NULL UNIQUE",
    "checkpoint": "NOT NULL REFERENCES checkpoint (checkpoint_digest)",
    "statement": "NOT NULL REFERENCES statement (seq)",
}


@dataclass(frozen=True, slots=True, eq=False)
class LedgerTable:
    """A table of the ledger.

    Attributes:
        name: its name.
        columns: column → its type, a word of `_TYPES_OF`, and its rule, a word of `_RULES`.
        key: the columns of its key.
        first: whether the first row of a key is kept; otherwise a later statement about a key overwrites it.
        indexes: name → columns.
    """

    name: str
    columns: Mapping[str, str]
    key: tuple[str, ...]
    first: bool = False
    indexes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])

    def creation(self, dialect: str) -> list[str]:
        """The statements that create the table and its indexes, where they do not exist."""
        types = _TYPES_OF[dialect]
        words = {name: column.partition(" ") for name, column in self.columns.items()}
        parts = [f"{name} {types[kind]} {_RULES[rule]}".rstrip() for name, (kind, _, rule) in words.items()]
        table = f"{self.name} ({', '.join(parts)}, {_KEY_WORDS.get(self.name, 'PRIMARY KEY')} ({', '.join(self.key)}))"
        indexes = [
            f"CREATE {'UNIQUE ' if name in _UNIQUE else ''}INDEX IF NOT EXISTS {name} "
            f"ON {self.name} ({', '.join(columns)})"
            for name, columns in self.indexes.items()
        ]
        return [f"CREATE TABLE IF NOT EXISTS {table}", *indexes]

    def insertion(self) -> str:
        """The statement that adds a row; its parameters are named like the columns."""
        values = ", ".join(f":{name}" for name in self.columns)
        return f"INSERT INTO {self.name} ({', '.join(self.columns)}) VALUES ({values})"  # noqa: S608  our own names

    def upsert(self) -> str:
        """The statement that writes a row: the first row of a key is kept, or the last one wins."""
        rest = [] if self.first else [name for name in self.columns if name not in self.key]
        change = (
            f"UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in rest)}" if rest else "NOTHING"
        )
        return f"{self.insertion()} ON CONFLICT ({', '.join(self.key)}) DO {change}"


_KEY_WORDS = {"edge": "UNIQUE"}
_UNIQUE = frozenset({"statement_prev"})  # two statements cannot continue the same one

checkpoint = LedgerTable(
    "checkpoint",
    {
        "checkpoint_digest": "digest",
        "weights_digest": "digest",
        "format": "text",
        "format_version": "text null",
        "kind": "text",
        "step": "large null",
        "tensors": "large",
        "parameters": "large",
        "nbytes": "large",
    },
    ("checkpoint_digest",),
    first=True,
    indexes={"ix_checkpoint_weights_digest": ("weights_digest",)},
)

statement = LedgerTable(
    "statement",
    {
        "seq": "number",
        "prev": "hash",
        "hash": "hash unique",
        "kind": "text",
        "schema": "small",
        "content": "hash",
        "body": "long",
        "time": "text",  # by the clock of the machine that wrote it
        "storage_time": "text",  # by the clock of the ledger's storage
    },
    ("seq",),
    indexes={
        "ix_statement_content": ("content",),
        "statement_prev": ("prev",),
        "statement_kind": ("kind", "seq"),
    },
)


location = LedgerTable(
    "location",
    {
        "checkpoint_digest": "digest checkpoint",
        "uri": "text",
        "fingerprint": "text",
        "seen": "text",
        "statement": "number statement",
    },
    ("checkpoint_digest", "uri"),
    indexes={"location_uri": ("uri", "statement")},
)

tombstone = LedgerTable(  # also for unknown checkpoints, so without a foreign key to `checkpoint`
    "tombstone",
    {"checkpoint_digest": "digest", "uri": "text", "time": "text", "statement": "number statement"},
    ("checkpoint_digest", "uri"),
)

conversion = LedgerTable(
    "conversion",
    {
        "statement": "number statement",
        "source": "digest checkpoint",
        "source_uri": "text",
        "source_fingerprint": "text",
        "target": "digest checkpoint",
        "target_uri": "text",
        "format": "text",
        "plan_digest": "hash",
        "options": "long",
        "software": "text",
        "lossless": "flag",
        "time": "text",
    },
    ("statement",),
    first=True,
    indexes={
        "ix_conversion_source": ("source",),
        "ix_conversion_target": ("target",),
        "ix_conversion_target_uri": ("target_uri",),
        "conversion_source": ("source_fingerprint", "source_uri"),
    },
)

edge = LedgerTable(
    "edge",
    {
        "source": "digest checkpoint",
        "target": "digest checkpoint",
        "plan_digest": "hash",
        "statement": "number statement",
    },
    ("source", "target", "plan_digest"),
    first=True,
    indexes={"ix_edge_target": ("target",), "edge_statement": ("statement",)},
)

verification = LedgerTable(
    "verification",
    {
        "checkpoint_digest": "digest checkpoint",
        "level": "text",
        "verdict": "text",
        "time": "text",
        "statement": "number statement",
    },
    ("checkpoint_digest", "level"),
)

registration = LedgerTable(
    "registration",
    {
        "checkpoint_digest": "digest checkpoint",
        "registry": "text",
        "name": "text",
        "state": "text",
        "version": "text null",
        "seen": "text",
        "statement": "number statement",
    },
    ("checkpoint_digest", "registry", "name"),
    indexes={"registration_name": ("registry", "name")},
)

projection = LedgerTable(
    "projection",
    {"name": "text", "delivered": "number", "failed": "long null", "tried": "text", "seal": "hash"},
    ("name",),
)

# The tables whose rows follow from the statements, in an order in which a row comes after those that it refers to.
DERIVED = (checkpoint, location, tombstone, conversion, edge, verification, registration)
TABLES = (statement, *DERIVED, projection)
NAMES = frozenset(table.name for table in TABLES)
_TYPES = {"number": int, "large": int, "small": int, "flag": int}
# Column → the type of its values, which is the same in all tables. SQLite stores any type in any column, and a flag as
# 0 or 1.
TYPES = {
    name: _TYPES.get(column.partition(" ")[0], str)
    for table in TABLES
    for name, column in table.columns.items()
}
FLAGS = frozenset(name for table in TABLES for name, column in table.columns.items() if column == "flag")

_SEALED = ("statement", "edge")
_SAID = "the ledger is append-only: "
_BROKEN = f"{_SAID}this does not continue its chain"


def stored_triggers() -> dict[str, str]:
    """Name → text of the triggers, as SQLite stores them."""
    texts = [trigger.replace("IF NOT EXISTS ", "") for trigger in sqlite_triggers()]
    return {text.split()[2]: text for text in texts}


def stored_postgres_triggers() -> dict[str, str]:
    """Name → table, type and text of the function of the triggers, as PostgreSQL stores them."""
    bodies = _bodies()
    return {
        name: f"{table} {_bits_of(f'BEFORE {verbs} {each}')} {bodies[function]}"
        for name, table, verbs, each, function in _TRIGGERS
    }


def _bits_of(words: str) -> int:
    return sum(_TRIGGER_BITS.get(word, 0) for word in words.split())


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


def postgres_triggers() -> tuple[str, ...]:
    """The statements that create these triggers in PostgreSQL; they also refuse TRUNCATE."""
    head = f"() RETURNS trigger LANGUAGE plpgsql SET search_path = {SCHEMA_NAME}, pg_temp AS"
    return (
        *(
            f"CREATE OR REPLACE FUNCTION {SCHEMA_NAME}.{name}{head} $$ {body} $$"
            for name, body in _bodies().items()
        ),
        *(
            f"CREATE OR REPLACE TRIGGER {name} BEFORE {verbs} ON {SCHEMA_NAME}.{table} "
            f"FOR EACH {each} EXECUTE FUNCTION {SCHEMA_NAME}.{function}()"
            for name, table, verbs, each, function in _TRIGGERS
        ),
    )


_REFUSE, _REQUIRE = "refuse_change", "require_continuation"
_TRIGGER_BITS = {
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


def _bodies() -> dict[str, str]:
    """Name → text of the functions of the triggers."""
    broken = _breaks(f"{SCHEMA_NAME}.statement")
    return {
        _REFUSE: f"BEGIN RAISE EXCEPTION '{_SAID}%', TG_TABLE_NAME; END",
        _REQUIRE: f"BEGIN IF {broken} THEN RAISE EXCEPTION '{_BROKEN}'; END IF; RETURN NEW; END",
    }


def _breaks(table: str) -> str:
    """The condition under which a new statement does not continue the chain."""
    last = f"SELECT hash FROM {table} ORDER BY seq DESC LIMIT 1"  # noqa: S608  our own name
    count = f"SELECT max(seq) FROM {table}"  # noqa: S608  our own name
    return f"NEW.seq <> coalesce(({count}), 0) + 1 OR NEW.prev <> coalesce(({last}), '{GENESIS}')"
