"""LedgerConnection: a transaction of the ledger, over the driver of its database, sqlite3 or psycopg.

Queries are SQL that SQLite and PostgreSQL understand, with parameters such as `:digest`. Two things differ between them
and have a word of their own: `column IN (:*digests)` finds one of many values, which are a single parameter, since
drivers limit how many a query has; and `field` is a field of a JSON text. SQLite stores any type in any column, so what
it returns is checked by the name of the column (`schema.TYPES`).
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from wherry.ledger.schema import FLAGS, TYPES, damage_error

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

SQLITE, POSTGRESQL = "sqlite", "postgresql"
_PAGE = 1000  # rows that a stream fetches at a time
_MANY = re.compile(r"IN \(:\*(\w+)\)")
_PARAMETER = re.compile(r":(\w+)")


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
        kinds = [(at, TYPES[name]) for at, name in enumerate(names) if name in TYPES]
        flags = [at for at, name in enumerate(names) if name in FLAGS]
        for row in cursor:
            for at, kind in kinds:
                if type(row[at]) is not kind and row[at] is not None:
                    found = type(row[at]).__name__
                    raise damage_error(f"values: {found} in a column of {kind.__name__}")
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

    def field(self, column: str, path: str) -> str:
        """SQL for the text of a field of a JSON text.

        Args:
            column: the column with the text.
            path: names with dots, such as `target.uri`.
        """
        if self.dialect == SQLITE:
            return f"json_extract({column}, '$.{path}')"
        return f"CAST({column} AS json) #>> '{{{path.replace('.', ',')}}}'"

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
