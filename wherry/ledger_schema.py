"""The tables of the ledger, and what keeps its statements from being changed.

`statement` and `edge` are append-only: triggers abort every UPDATE and DELETE. Whoever removes the triggers and
alters a row breaks the chain of hashes, which `check_chain` finds. `checkpoint` and `location` are attributes
and sightings; `registration` is a claim that moves from pending to registered.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA = 1
_DIGEST = String(64)

metadata = MetaData()

checkpoint = Table(
    "checkpoint",
    metadata,
    Column("checkpoint_digest", _DIGEST, primary_key=True),
    Column("weights_digest", _DIGEST, nullable=False, index=True),
    Column("format", String, nullable=False),
    Column("format_version", String),
    Column("kind", String, nullable=False),
    Column("step", BigInteger),
    Column("tensors", BigInteger, nullable=False),
    Column("parameters", BigInteger, nullable=False),
    Column("nbytes", BigInteger, nullable=False),
)

location = Table(
    "location",
    metadata,
    Column("checkpoint_digest", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False),
    Column("uri", String, nullable=False, index=True),
    Column("fingerprint", String, nullable=False),
    Column("seen", String, nullable=False),
    UniqueConstraint("checkpoint_digest", "uri"),
)

statement = Table(
    "statement",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("prev", _DIGEST, nullable=False),
    Column("hash", _DIGEST, nullable=False, unique=True),
    Column("kind", String, nullable=False),
    Column("schema", Integer, nullable=False),
    Column("content", _DIGEST, nullable=False, index=True),
    Column("body", Text, nullable=False),
    Column("time", String, nullable=False),
)

edge = Table(
    "edge",
    metadata,
    Column("source", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False),
    Column("target", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False, index=True),
    Column("plan_digest", _DIGEST, nullable=False),
    Column("statement", Integer, ForeignKey(statement.c.seq), nullable=False),
    UniqueConstraint("source", "target", "plan_digest"),
)

registration = Table(
    "registration",
    metadata,
    Column("checkpoint_digest", _DIGEST, ForeignKey(checkpoint.c.checkpoint_digest), nullable=False),
    Column("registry", String, nullable=False),
    Column("name", String, nullable=False),
    Column("state", String, nullable=False),
    Column("version", String),
    Column("seen", String, nullable=False),
    UniqueConstraint("checkpoint_digest", "registry", "name"),
)

Index("registration_name", registration.c.registry, registration.c.name)

TRIGGERS = tuple(
    f"CREATE TRIGGER IF NOT EXISTS {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
    f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: {table}'); END"
    for table in ("statement", "edge")
    for verb in ("UPDATE", "DELETE")
)
