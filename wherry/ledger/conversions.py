"""Conversions as rows: which sources have been converted already, and into what.

Reconciliation asks this for a whole night, so it is one query over a table of its own that reads no statement.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, Select, and_, or_, select

from wherry.errors import UsageError
from wherry.ledger import schema as tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.ledger.database import Ledger

_AT_ONCE = 500  # statements asked for in one query; drivers bound the number of parameters


@dataclass(frozen=True, slots=True)
class ConvertedTarget:
    """One conversion that was carried out.

    Attributes:
        target_uri: where the result was committed.
        format: of the result.
        target_digest: checkpoint digest of the result.
        plan_digest: the plan that was carried out.
        options: the plan's options.
        time: when it was finished; UTC.
        source_uri: what was read.
        source_fingerprint: mark of the source's files then.
        source_digest: checkpoint digest of the source.
        statement: number of the ledger's statement.
        lossless: whether every move was exact.
        software: the version of wherry that did it; empty where that is not known.
        gone: when the result was deleted there (UTC); None where nothing says so.
    """

    target_uri: str
    format: str
    target_digest: str
    plan_digest: str
    options: Mapping[str, Any]
    time: str
    source_uri: str
    source_fingerprint: str
    source_digest: str
    statement: int
    lossless: bool
    software: str
    gone: str | None


def conversions_of(
    ledger: Ledger,
    fingerprint: str | None = None,
    checkpoint_digest: str | None = None,
    *,
    uri: str | None = None,
) -> list[ConvertedTarget]:
    """What was made of a source, in the order in which it was recorded.

    Args:
        ledger: where.
        fingerprint: the source's files as they are now; with `uri` only of those that lay there.
        checkpoint_digest: or the source's identity, wherever it lay.
        uri: where the source lies; alone, everything that was ever made of what lay there.

    Raises:
        UsageError: nothing is asked for.
    """
    table = tables.conversion.c
    here = [table.source_fingerprint == fingerprint] if fingerprint is not None else []
    here += [table.source_uri == uri] if uri is not None else []
    either = [and_(*here)] if here else []
    either += [table.source == checkpoint_digest] if checkpoint_digest is not None else []
    if not either:
        raise UsageError("conversions of what?", cure="give a fingerprint, a URI or a checkpoint digest")
    with ledger.read() as connection:
        return [_converted(row) for row in connection.execute(_query().where(or_(*either)))]


def converted_sources(ledger: Ledger) -> dict[tuple[str, str], list[ConvertedTarget]]:
    """(source URI, source fingerprint) → what was made of it, for everything that was ever converted."""
    found = defaultdict[tuple[str, str], list[ConvertedTarget]](list)
    with ledger.read() as connection:
        for row in connection.execute(_query()):
            one = _converted(row)
            found[one.source_uri, one.source_fingerprint].append(one)
    return dict(found)


def last_conversions(ledger: Ledger) -> dict[str, ConvertedTarget]:
    """Target URI → the conversion that was committed there last."""
    with ledger.read() as connection:
        rows = [_converted(row) for row in connection.execute(_query())]
    return {row.target_uri: row for row in rows}


def asked_in(ledger: Ledger, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Number of a conversion's statement → what was stated; see `converter.command`. Empty where it is not kept."""
    table, every, found = tables.statement.c, list(numbers), dict[int, dict[str, Any]]()
    with ledger.read() as connection:
        for start in range(0, len(every), _AT_ONCE):
            query = select(table.seq, table.body).where(table.seq.in_(every[start : start + _AT_ONCE]))
            found |= {row.seq: json.loads(row.body).get("asked", {}) for row in connection.execute(query)}
    return found


def _query() -> Select[Any]:
    """Conversions with the tombstone of their target, where that is younger than the place it marks."""
    done, stone, place = tables.conversion.c, tables.tombstone.c, tables.location.c
    same = (stone.checkpoint_digest == done.target) & (stone.uri == done.target_uri)
    there = (place.checkpoint_digest == done.target) & (place.uri == done.target_uri)
    buried = and_(same, stone.statement >= place.statement)
    return (
        select(tables.conversion, stone.time.label("gone"))
        .join(tables.location, there)
        .outerjoin(tables.tombstone, buried)
        .order_by(done.statement)
    )


def _converted(row: Row[Any]) -> ConvertedTarget:
    return ConvertedTarget(
        target_uri=row.target_uri,
        format=row.format,
        target_digest=row.target,
        plan_digest=row.plan_digest,
        options=json.loads(row.options),
        time=row.time,
        source_uri=row.source_uri,
        source_fingerprint=row.source_fingerprint,
        source_digest=row.source,
        statement=row.statement,
        lossless=row.lossless,
        software=row.software,
        gone=row.gone,
    )
